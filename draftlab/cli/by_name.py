"""From Python, what commands do with names: a target, a decoder, and an answer.

In: the words of a command line, as text. Out: a `Target`, a `Decoder`, or an answer's text.
"""

from typing import Any

from draftlab.cli.drafters import compose_for_drafters, open_drafter
from draftlab.cli.schema import GenerateCommandSettings, settings_of
from draftlab.cli.words import split_words
from draftlab.decoding.decoder import Decoder
from draftlab.drafters.base import Drafter
from draftlab.settings.compose import compose
from draftlab.targets.asking import encode_turns
from draftlab.targets.load import load_target
from draftlab.targets.target import Target


def open_target(*words: str) -> Target:
    """Load the target of a run, or the one that words choose.

    Args:
        *words: a run's folder, key=value words such as "target=demo" or "target.dtype=float32", or
            both.

    Raises:
        ConfigError: words that do not compose, or a run or model that is not there.
    """
    runs, chosen = split_words(words, most=1)
    chosen += [f"drafter={run}" for run in runs]
    return load_target(
        settings_of(GenerateCommandSettings, compose_for_drafters("generate", chosen)).target
    )


def open_decoder(target: Target, drafter: Drafter | str | None, *words: str) -> Decoder:
    """Make a decoder, whose `generate` answers many prompts with per-prompt settings.

    Args:
        target: who answers.
        drafter: who proposes tokens, or its name; None decodes plainly.
        *words: such as "decode=sampled" or "decode.batch_size=8".

    Raises:
        ConfigError: words that do not compose, or that do not suit this drafter.
    """
    settings = settings_of(GenerateCommandSettings, compose("generate", words))
    found = open_drafter(drafter, target) if isinstance(drafter, str) else drafter
    return Decoder(target, found, settings.decode)


def encode_question(target: Target, text: str, **template_options: Any) -> list[int]:
    """Write what a user says into the target's chat template, as token ids; T5 reads plain text.

    Args:
        target: who is asked.
        text: what is said.
        **template_options: further variables of the template, such as enable_thinking=False.
    """
    return encode_turns(target, [{"role": "user", "content": text}], options=template_options)


def answer(prompt: str, target: Target, drafter: Drafter | None = None, *words: str) -> str:
    """Let a target answer a prompt, sped up by a drafter; its own answer either way.

    Args:
        prompt: what a user says.
        target: who answers.
        drafter: who proposes tokens; None decodes plainly.
        *words: such as "decode.max_new_tokens=64" or "decode=sampled".

    Raises:
        ConfigError: words that do not compose, or a prompt without room for an answer.
    """
    decoder = open_decoder(target, drafter, *words)
    (found,) = decoder.generate([encode_question(target, prompt)])
    if found.text is not None:
        return found.text  # it ends before a stop string
    return target.tokenizer.decode(list(found.output_ids), skip_special_tokens=True)
