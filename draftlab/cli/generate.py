"""`draftlab generate`: answers, streamed, with accepted draft tokens in colour."""

import sys
import time
from collections.abc import Sequence

from draftlab.cli.words import split_words
from draftlab.decoding.records import Generation
from draftlab.errors import DataError
from draftlab.settings.compose import compose

HELP = """usage: draftlab generate prompt=TEXT [drafter=DRAFTER] [target=TARGET] [key=value ...]
       draftlab generate prompts=FILE ...

Answers as the target alone would, only faster: the same text at temperature 0, the same law above
it. Text streams as it comes. In a terminal, tokens that the drafter proposed and the target
accepted are green, a line below the text tells tau and tokens/s so far, and of several prompts each
stands above its answer (NO_COLOR is respected). Elsewhere stdout gets the answers alone, in order,
a blank line between two (one answer may hold blank lines itself). The summary goes to stderr.

what is asked:
  prompt=TEXT        one question; prompt=- takes the whole of stdin
  prompts=FILE       many: one a line, or chats, one JSON object a line, in a .jsonl file
  prompts=-          many, one a line of stdin
The target's chat template writes it down. T5 models have none and read the text as it is (of a
chat, the texts of all turns, a blank line between).

who answers, and who drafts:
  target=demo        tiny (random, the default), demo, hub target.name=OWNER/NAME, local, gguf
  drafter=ngram      a kind that needs no training, a run, a drafter's folder, or a hub id
                     (a run brings its target along)

how (decode.KEY=VALUE; conf/decode/greedy.yaml has every key):
  decode=sampled                     temperature 1 instead of greedy
  decode.temperature=0.7             with decode.top_k=20, decode.top_p=0.8, decode.min_p=0.05
  decode.repetition_penalty=1.1      decode.frequency_penalty=0.3, decode.presence_penalty=0.3
  decode.logit_bias={1234: -5.0}     added to the logit of a token id
  decode.max_new_tokens=200          decode.min_new_tokens=20
  decode.stop=["Question:"]          strings that end an answer; they are not shown
  decode.num_draft_tokens=4          K; null takes the drafter's own
  decode.batch_size=8                prompts answered at once; they are shown in order all the same
  decode.seed=1                      another draw at temperatures above 0

the summary:
  tau          tokens a verify step gave, the target's own one included; 1.00 is plain decoding
  tokens/s     while decoding, the time that prompts took not counted
  accepted     share of the draft tokens that the target kept
  by depth     chance that a draft token is kept, once all before it were

examples:
  draftlab generate target=demo drafter=ngram prompt="Count from one to twenty in words."
  draftlab generate drafter=outputs/demo/RUN decode=sampled decode.temperature=0.7 prompt="Hi!"
  draftlab generate target=demo prompts=questions.txt decode.batch_size=8 > answers.txt
"""

_MOST_NAMED = 8


def run(args: Sequence[str]) -> int:
    """Answer one prompt or many."""
    _, words = split_words(args, most=0)
    compose("generate", words)  # a misspelt word is told before torch is loaded
    from draftlab.cli.answer_stream import AnswerStream, open_screen
    from draftlab.cli.drafters import compose_for_drafters, open_drafter
    from draftlab.cli.hardware import apply_hardware, place_drafters
    from draftlab.cli.measure import require_decoding
    from draftlab.cli.questions import Question, read_questions
    from draftlab.cli.schema import GenerateCommandSettings, settings_of
    from draftlab.data.template import RowProblem
    from draftlab.decoding.decoder import Decoder
    from draftlab.decoding.stops import StopStrings
    from draftlab.targets.asking import encode_turns
    from draftlab.targets.load import load_target

    settings = settings_of(GenerateCommandSettings, compose_for_drafters("generate", words))
    require_decoding(settings.decode)
    questions = read_questions(settings.prompt, settings.prompts, settings.paths.cache)
    apply_hardware(settings.hardware, places_drafters=True)
    target = load_target(settings.target)
    place_drafters(target, settings.hardware)
    decoder = Decoder(target, open_drafter(settings.drafter, target), settings.decode)

    def encode(question: Question) -> list[int]:
        try:
            return encode_turns(
                target, list(question.messages), question.tools, settings.data.template_options
            )
        except RowProblem as problem:
            said = f"{question.place}: cannot ask {question.title!r}: {problem}"
            raise DataError(said) from None

    prompts = [encode(question) for question in questions]
    places = [question.place for question in questions]
    require_room(places, list(map(len, prompts)), target.spec.max_positions)
    silent = frozenset(target.spec.eos_ids)
    stops = StopStrings(target.tokenizer, settings.decode.stop, silent)
    began = time.perf_counter()
    with AnswerStream(stops, [q.title for q in questions], open_screen()) as shown:
        answers = decoder.generate(prompts, on_tokens=shown.on_tokens, on_finish=shown.on_finish)
    spent = time.perf_counter() - began
    print(f"\n{summarise(answers, spent, depth=decoder.num_draft_tokens)}", file=sys.stderr)
    return 0


def require_room(places: Sequence[str], lengths: Sequence[int], most: int) -> None:
    """Refuse prompts that leave no room for an answer, before any is answered.

    Args:
        places: where each stands, for people.
        lengths: tokens of each.
        most: tokens that the target takes, the answer included.

    Raises:
        DataError: naming each that is too long.
    """
    long = [
        f"{place} has {length} tokens"
        for place, length in zip(places, lengths, strict=True)
        if length >= most
    ]
    if long:
        more = f" and {len(long) - _MOST_NAMED} more" if len(long) > _MOST_NAMED else ""
        raise DataError(
            f"{', '.join(long[:_MOST_NAMED])}{more}, chat template included, and the target takes "
            f"{most} with the answer; shorten or leave out what is too long"
        )


def summarise(answers: Sequence[Generation], spent: float, *, depth: int) -> str:
    """Say how it went, in a few lines.

    Args:
        answers: all of them.
        spent: seconds for all, prompts included.
        depth: K, the deepest draft token there can be.
    """
    steps = [step for answer in answers for step in answer.steps]
    waits = sorted(answer.first_token_s for answer in answers)
    wait = " to ".join(dict.fromkeys(f"{1000 * s:.0f}" for s in (waits[0], waits[-1])))
    finishes = [answer.finish for answer in answers]
    ends = ", ".join(f"{finishes.count(f)} {f}" for f in ("eos", "stop", "length") if f in finishes)
    count = f"{len(answers)} answers, " if len(answers) > 1 else ""
    lines = [
        f"{count}{sum(len(answer.output_ids) for answer in answers)} tokens in {spent:.1f} s "
        f"(first token after {wait} ms), finish: {ends}"
    ]
    if any(answer.is_lossy for answer in answers):
        lines.append("LOSSY: this rule does not keep the target's law")
    if not steps:
        return lines[0]
    emitted = sum(step.num_emitted for step in steps)
    # a step's seconds are those of all rows that shared it
    seconds = sum((s.draft_s + s.verify_s + s.commit_s) / s.batch_live for s in steps)
    lines.append(
        f"tau {emitted / len(steps):.2f} over {len(steps)} verify steps, "
        f"{emitted / max(seconds, 1e-9):.1f} tokens/s"
    )
    drafted, accepted = (
        sum(getattr(s, f"num_{k}") for s in steps) for k in ("drafted", "accepted")
    )
    if drafted:
        lines.append(
            f"{accepted} of {drafted} draft tokens accepted ({100 * accepted / drafted:.0f} %), "
            f"by depth {' '.join(f'{a:.2f}' for a in compute_alphas(answers, depth))}"
        )
    return "\n".join(lines)


def compute_alphas(answers: Sequence[Generation], depth: int) -> list[float]:
    """Compute alpha_k: of the steps that kept k - 1 and drafted k or more, the share that kept k.

    Args:
        answers: all of them.
        depth: K; depths that no step reached are left out.
    """
    steps = [step for answer in answers for step in answer.steps]
    alphas = []
    for k in range(1, depth + 1):
        reached = [s for s in steps if s.num_accepted >= k - 1 and s.num_drafted >= k]
        if reached:
            alphas.append(sum(s.num_accepted >= k for s in reached) / len(reached))
    return alphas
