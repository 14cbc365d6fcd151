"""`draftlab generate`: one answer, streamed, with accepted draft tokens in colour."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from draftlab.cli.words import split_words
from draftlab.errors import ConfigError

HELP = """usage: draftlab generate drafter=DRAFTER prompt=TEXT [target=...] [key=value ...]

Answers a prompt and streams the text; tokens that the drafter proposed and the target accepted are
green. Ends with acceptance length and tokens per second.

  drafter=DRAFTER              ngram, a run, a drafter folder or a hub id
  decode.max_new_tokens=200 decode=sampled decode.temperature=0.7 decode.num_draft_tokens=4

examples:
  draftlab generate target=demo drafter=ngram prompt="Count from one to twenty in words."
  draftlab generate drafter=outputs/demo/20261129-101500-ab12 prompt="What's 2+2?"
"""

_ACCEPTED, _PLAIN = "\x1b[32m", "\x1b[0m"


class TextStream:
    """Turns token ids into text as they come, and never shows half a character (case O-12)."""

    def __init__(self, tokenizer: Any) -> None:
        """Start with no text."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """Take in one token; give the text that is certain by now and was not given before."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\ufffd") or not text.startswith(self._shown):
            return ""  # bytes of a character are still to come
        fresh, self._shown = text[len(self._shown) :], text
        return fresh

    def rest(self) -> str:
        """Give what was held back; at the end there is nothing to wait for."""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text[len(self._shown) :]


def run(args: Sequence[str]) -> int:
    """Answer one prompt."""
    _, words = split_words(args, most=0)
    from draftlab.cli.drafters import compose_for_drafters, open_drafter
    from draftlab.cli.hardware import apply_hardware
    from draftlab.cli.schema import GenerateCommandSettings, settings_of
    from draftlab.data.chat import encode_prompt
    from draftlab.decoding.decoder import Decoder
    from draftlab.targets.load import load_target

    settings = settings_of(GenerateCommandSettings, compose_for_drafters("generate", words))
    if not settings.prompt:
        raise ConfigError('nothing to answer; pass prompt="..."')
    apply_hardware(settings.hardware)
    target = load_target(settings.target)
    drafter = open_drafter(settings.drafter, target)
    ids = encode_prompt(target.tokenizer, [{"role": "user", "content": settings.prompt}])
    stream, is_terminal = TextStream(target.tokenizer), sys.stdout.isatty()

    def show(_: int, tokens: list[int], num_accepted: int) -> None:
        for place, token in enumerate(tokens):
            text = stream.add(token)
            if is_terminal and place < num_accepted:
                text = f"{_ACCEPTED}{text}{_PLAIN}"
            print(text, end="", flush=True)

    began = time.perf_counter()
    answer = Decoder(target, drafter, settings.decode).generate([ids], on_tokens=show)[0]
    spent = time.perf_counter() - began
    print(stream.rest())
    steps = answer.steps
    tau = sum(s.num_emitted for s in steps) / len(steps) if steps else 1.0
    print(
        f"\n{len(answer.output_ids)} tokens, {len(answer.output_ids) / spent:.1f} tokens/s "
        f"(first token after {answer.first_token_s * 1000:.0f} ms), tau {tau:.2f}, "
        f"{sum(s.num_accepted for s in steps)} of {sum(s.num_drafted for s in steps)} draft tokens "
        f"accepted, finish {answer.finish}",
        file=sys.stderr,
    )
    return 0
