"""What each prompt asks for, checked before anything heavy runs.

In: prompts, and settings for all or one a prompt. Out: one row each, not yet in a slot.
"""

from collections.abc import Sequence
from typing import TypeVar

from draftlab.decoding.slots import Sequence as Row
from draftlab.decoding.stops import StopStrings
from draftlab.errors import ConfigError
from draftlab.sampling import Sampling
from draftlab.targets.target import Target

T = TypeVar("T")


def make_rows(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling | Sequence[Sampling],
    max_new_tokens: int | Sequence[int],
    stops: StopStrings | None,
    row_keys: Sequence[int] | None,
) -> list[Row]:
    """Make a row of every prompt.

    Raises:
        ConfigError: an empty prompt, one that leaves no room for an answer or has ids that the
            target does not know, a limit below 1, or as many settings as there are no prompts.
    """
    count = len(prompts)
    laws = _spread(sampling, count, "sampling") if count else []
    limits = _spread(max_new_tokens, count, "max_new_tokens") if count else []
    keys = list(range(count)) if row_keys is None else _spread(row_keys, count, "row_keys")
    for law in {id(law): law for law in laws}.values():
        law.check_vocabulary(target.spec.vocab_size)
    return [
        Row(
            prompt_index=index,
            prompt_ids=list(prompt),
            limit=_limit(target, index, prompt, limit),
            sampling=law,
            key=key,
            stops=stops,
        )
        for index, (prompt, law, limit, key) in enumerate(
            zip(prompts, laws, limits, keys, strict=True)
        )
    ]


def _spread(given: T | Sequence[T], count: int, name: str) -> list[T]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ConfigError(
            f"{name} has {len(given)} entries for {count} prompts; expected one for all, or one a "
            "prompt"
        )
    return list(given)


def _limit(target: Target, index: int, prompt: Sequence[int], limit: int) -> int:
    if not prompt:
        raise ConfigError(f"prompts[{index}] is empty: expected at least one token")
    if limit < 1:
        raise ConfigError(f"max_new_tokens={limit} of prompts[{index}]: expected 1 or more")
    most = target.spec.vocab_size - 1
    unknown = [token for token in (min(prompt), max(prompt)) if not 0 <= token <= most]
    if unknown:
        raise ConfigError(
            f"prompts[{index}] holds token id {unknown[0]}, and target {target.spec.name} knows "
            f"the ids 0 to {most}; encode prompts with this target's tokenizer"
        )
    room = target.spec.max_positions - len(prompt)
    if room < 1:
        raise ConfigError(
            f"prompts[{index}] has {len(prompt)} tokens, and the target takes "
            f"{target.spec.max_positions} with the answer; shorten it"
        )
    return min(limit, room)
