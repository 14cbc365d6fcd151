"""How often a token passes a drafter in training, told by the keys of its settings.

Kinds are not named: whoever unrolls says `unroll_steps`, block drafters say `block_size`, and so
on. A kind with other keys counts as one pass.
"""

from draftlab.drafters.base import DrafterSettings

_UNROLLED = ("unroll_steps", "hass_steps")


def passes_of_body(drafter: DrafterSettings, sample_tokens: int) -> float:
    """Count how many rows of a drafter's network one token of a sample makes.

    Args:
        drafter: settings of any kind.
        sample_tokens: length of a sample, for drafters that train a number of blocks in each.
    """
    given = drafter.model_dump()
    if block := given.get("block_size"):
        anchors = min(given["max_anchors"] or sample_tokens, sample_tokens)
        return anchors * block / sample_tokens
    if depths := given.get("num_depths"):
        keep, floor = given["depth_keep"], given["depth_keep_floor"]
        return sum(max(keep**depth, floor) for depth in range(depths))
    return next((float(given[key]) for key in _UNROLLED if given.get(key)), 1.0)


def passes_of_head(drafter: DrafterSettings, sample_tokens: int) -> float:
    """Count how many predictions one token of a sample makes."""
    heads = getattr(drafter, "num_heads", None)
    return float(heads) if heads else passes_of_body(drafter, sample_tokens)
