"""`draftlab regenerate`: the target answers the training prompts."""

from collections.abc import Sequence

from draftlab.cli.words import split_words
from draftlab.errors import ConfigError
from draftlab.settings.compose import compose

HELP = """usage: draftlab regenerate [recipe=FAMILY/NAME] [key=value ...]

The target answers the prompts of the data in its own words, with the hidden states the drafter
needs. Takes the same words as `draftlab train`, which then finds the answers done. Shards are
written whole; the same command after a kill goes on with the first missing one.

  regenerate.max_new_tokens=160 regenerate.answers_per_prompt=2 regenerate.temperature=0.7
  regenerate.batch_size=32 regenerate.prompts_per_shard=64 regenerate.capture_features=false

examples:
  draftlab regenerate recipe=eagle3/smollm2-demo
  draftlab regenerate target=demo data=jsonl data.paths=prompts.jsonl
"""


def run(args: Sequence[str]) -> int:
    """Answer what is missing, and say where the answers are."""
    _, words = split_words(args, most=0)
    compose("train", words)  # a misspelt word is told before torch is loaded
    from draftlab.cli.collect import collect_samples
    from draftlab.cli.hardware import apply_hardware
    from draftlab.cli.launch import compose_run, require_inputs
    from draftlab.cli.train_job import find_needs
    from draftlab.targets.load import load_target

    if any(word.replace(" ", "") == "data.answers=given" for word in words):
        raise ConfigError(
            "data.answers=given: the answers that the data has are taken as they are, so there is "
            "nothing to write; drop it, and the target answers"
        )
    settings, _ = compose_run(words)
    data = settings.data.model_copy(update={"answers": "target"})
    require_inputs(settings.model_copy(update={"data": data}))
    apply_hardware(settings.hardware)
    target = load_target(settings.target)
    collected = collect_samples(
        target,
        data,
        settings.regenerate,
        settings.paths,
        needs=find_needs(settings, target),
        seed=settings.seed,
    )
    facts = collected.facts
    print(
        f"{facts['num_answers']} answers, {facts['num_answer_tokens']} tokens, in {facts['folder']}"
    )
    return 0
