"""Which target this is: the identity card that travels with every drafter trained for it."""

from dataclasses import asdict, dataclass
from typing import Any

from draftlab.errors import TargetMismatch


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Identity and sizes of a target.

    Attributes:
        name: what a person calls it, such as "HuggingFaceTB/SmolLM2-135M-Instruct".
        source: where it was loaded from: hub, local, gguf, demo or tiny.
        checksum: sha256 over the weights' fingerprint; two targets with equal checksums are one.
        quantisation: "none", or in words, such as "Q4_1, dequantised".
        hidden_size: D, width of taps and final hidden states.
        vocab_size: V, rows of the LM head (may exceed the tokenizer's ids: padding rows).
        num_token_ids: ids the tokenizer knows; ids from here to V are padding, never proposed.
        num_layers: decoder layers; taps are numbered 1..num_layers.
        max_positions: longest sequence the target was built for, tokens.
        tokenizer_sha256: fingerprint of the tokenizer's vocabulary and template.
        eos_ids: ids that end an answer.
        dtype: dtype of the weights as loaded, such as "bfloat16".
    """

    name: str
    source: str
    checksum: str
    quantisation: str
    hidden_size: int
    vocab_size: int
    num_token_ids: int
    num_layers: int
    max_positions: int
    tokenizer_sha256: str
    eos_ids: tuple[int, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """Give plain data for drafter.json, manifests and reports."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TargetSpec":
        """Read what `to_json` wrote."""
        return cls(**{**data, "eos_ids": tuple(data["eos_ids"])})


def name_with_quantisation(name: str, quantisation: str) -> str:
    """Name a target for people: what its weights come from stands behind, unless it is in the name.

    Args:
        name: of the target.
        quantisation: its spec's.
    """
    if quantisation in ("none", "") or quantisation in name:
        return name
    return f"{name} ({quantisation})"


def check_same_target(saved: TargetSpec, given: TargetSpec, *, what: str) -> list[str]:
    """Check that something made for one target may be used with another.

    Args:
        saved: the target it was made for.
        given: the target at hand.
        what: what was made, for the message, such as "drafter outputs/x".

    Returns:
        Warnings: differences under which outputs stay exact but acceptance may suffer (other
        weights or dtype: case O-18).

    Raises:
        TargetMismatch: shapes or tokenizer differ, so the drafter's ids or features mean other
            things.
    """
    for name in ("tokenizer_sha256", "hidden_size", "vocab_size", "num_layers"):
        old, new = getattr(saved, name), getattr(given, name)
        if old != new:
            raise TargetMismatch(
                f"{what} was made for target {saved.name} with {name}={_short(old)}, but target "
                f"{given.name} has {name}={_short(new)}; pass the target it was made for, or train "
                f"a drafter for {given.name}"
            )
    warnings = []
    if saved.checksum != given.checksum:
        warnings.append(
            f"{what} was trained on other weights ({saved.name}, {saved.quantisation}, "
            f"{_short(saved.checksum)}) than this target ({given.name}, {given.quantisation}, "
            f"{_short(given.checksum)}): output stays exact, acceptance may be low"
        )
    return warnings


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) > 24 else text
