"""Numbers that prove, at load, that stepwise passes over our memory equal whole passes.

Three prompts run in ragged steps, with a draft tree and its compaction in the middle, against
transformers' own forward over each whole prompt. Read check_numbers, then _run_stepwise.
"""

from typing import Any

import torch

from draftlab.errors import UnsupportedTarget
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.adapter import Door, HFDoor, ProbeReport
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest
from draftlab.targets.model_view import ModelView
from draftlab.targets.step import Step

_LENGTHS = (17, 13, 15)  # tokens, longer than the windows of tiny targets
_NO_FEATURES = FeatureRequest()
# largest difference allowed, as a share of the largest value; rounding grows with the dtype, while
# a wrong mask or position is off by tenths and more
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.02}
# in half precision an expert router may flip on rounding and move single positions far
_TYPICAL_ONLY = frozenset({torch.bfloat16, torch.float16})


def check_numbers(
    reference: HFDoor, view: ModelView, probe: ProbeReport, kv_shape: tuple[int, int]
) -> dict[str, Any]:
    """Compare stepwise passes with whole ones, and the view's head and norm with the model's.

    Args:
        reference: with our attention attached; left so.
        view: of the same model.
        probe: what a probe pass showed.
        kv_shape: key heads and head width of our memory.

    Returns:
        What was found, as plain data.

    Raises:
        UnsupportedTarget: something differs by more than rounding.
    """
    prompts = _prompts(view)
    # caps and sinks are dropped in silence, or refused, by some versions' fused attention
    if probe.has_softcap or probe.has_sinks:
        reference.plain_attention = "eager"
    request = FeatureRequest((view.spec.num_layers,), wants_final=True)
    reference.detach()
    try:
        with torch.inference_mode():
            whole = [reference.forward_plainly(row.unsqueeze(0), request, True) for row in prompts]
    finally:
        reference.attach()
    logits = [_given(out.logits)[0] for out in whole]
    finals = [_given(out.features.final)[0] for out in whole]
    with torch.inference_mode():
        kv = _open_kv(view, kv_shape)
        stepwise = _run_stepwise(reference, kv, prompts)
        found = {
            "stepwise_difference": _difference(stepwise, logits),
            "head_difference": _difference([view.head(f) for f in finals], logits),
            "rows_bitwise_equal": _is_row_invariant(reference, kv, prompts),
        }
        if reference.anatomy.norm is not None:
            taps = [_given(out.features.taps)[0, :, 0] for out in whole]
            found["norm_difference"] = _difference([view.final_norm(t) for t in taps], finals)
    tolerance = TOLERANCE[view.dtype]
    for name, meaning in (
        ("stepwise_difference", "stepwise passes over draftlab's memory give other logits"),
        ("head_difference", "its logits are not head(final state) with a known scale or cap"),
        ("norm_difference", "its final state is not norm(output of the last layer)"),
    ):
        if not found.get(name, 0.0) <= tolerance:
            raise UnsupportedTarget(
                f"{meaning}: relative difference {found[name]:.3g}, expected at most {tolerance}"
            )
    return found | {
        "tolerance": tolerance,
        "compared_with": reference.plain_attention,
        "windows": [probe.windows[i] for i in sorted(probe.windows)],
        "has_softcap": probe.has_softcap,
        "has_sinks": probe.has_sinks,
    }


def compare_doors(
    reference: HFDoor, other: Door, view: ModelView, kv_shape: tuple[int, int]
) -> dict[str, Any]:
    """Compare another way through a target with the reference: logits, every tap, final states.

    Ragged rows, a tree, a lone token whose row has garbage behind it, and packed rows.

    Returns:
        Relative differences and whether wide passes of `other` equal narrow ones bit for bit.

    Raises:
        UnsupportedTarget: they differ by more than rounding.
    """
    prompts = _prompts(view)
    request = FeatureRequest(tuple(range(1, view.spec.num_layers + 1)), wants_final=True)
    rows = torch.arange(len(prompts), device=view.device)
    ids = torch.stack([prompt[:8] for prompt in prompts])
    base = torch.tensor([8, 5, 2], device=view.device)
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], device=view.device) > 0
    depths = torch.tensor([0, 1, 1], device=view.device)
    samples = torch.tensor([0, 0, 0, 1, 1, 1, 1, -1], device=view.device)
    places = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0], device=view.device)
    steps = (
        Step(rows, ids, torch.zeros_like(rows), 8),
        Step(rows, ids[:, :3], base, 16, depths.expand(3, -1), sees.expand(3, -1, -1)),
        Step(rows[1:2], ids[1:2, :1], base[1:2], 16),
        Step(
            rows,
            ids,
            torch.zeros_like(rows),
            8,
            places.expand(3, -1),
            segments=samples.expand(3, -1),
        ),
    )
    differences: dict[str, float] = {"logits": 0.0, "taps": 0.0, "final": 0.0}
    with torch.inference_mode():
        ours, theirs = _open_kv(view, kv_shape), _open_kv(view, kv_shape)
        for step in steps:
            expected = reference.forward(theirs, step, request, True)
            found = other.forward(ours, step, request, True)
            for name, a, b in (
                ("logits", found.logits, expected.logits),
                ("taps", found.features.taps, expected.features.taps),
                ("final", found.features.final, expected.features.final),
            ):
                gap = _difference([_given(a).flatten(0, -2)], [_given(b).flatten(0, -2)])
                differences[name] = max(differences[name], gap)
    tolerance = TOLERANCE[view.dtype]
    for name, value in differences.items():
        if not value <= tolerance:
            raise UnsupportedTarget(
                f"the {other.name} kernels give other {name} than transformers' modules: relative "
                f"difference {value:.3g}, expected at most {tolerance}"
            )
    with torch.inference_mode():
        is_row_invariant = _is_row_invariant(other, ours, prompts)
    report = {f"{other.name}_{name}_difference": value for name, value in differences.items()}
    return {**report, "rows_bitwise_equal": is_row_invariant}


def _prompts(view: ModelView) -> list[Int[Tensor, " T"]]:
    count = view.spec.num_token_ids
    return [
        (torch.arange(length, device=view.device) * 7919 + 104729 * (row + 1)) % count
        for row, length in enumerate(_LENGTHS)
    ]


def _open_kv(view: ModelView, kv_shape: tuple[int, int]) -> KVBuffers:
    return KVBuffers(
        num_layers=view.spec.num_layers,
        num_kv_heads=kv_shape[0],
        head_dim=kv_shape[1],
        slots=len(_LENGTHS),
        capacity=max(_LENGTHS) + 8,
        dtype=view.dtype,
        device=view.device,
    )


def _run_stepwise(reference: HFDoor, kv: KVBuffers, prompts: list[Tensor]) -> list[Tensor]:
    """Run prompts as ragged chains of 4, a tree with compaction, and chains again.

    Columns that a row does not keep are run again by its next pass, as rejected drafts are.
    """
    device = prompts[0].device
    rows = torch.arange(len(prompts), device=device)
    pieces: list[dict[int, Tensor]] = [{} for _ in prompts]
    base = [0] * len(prompts)
    kept = [4, 2, 3]
    while min(base) < 6:
        _run_chain(reference, kv, prompts, base, pieces, width=4)
        base = [b + k for b, k in zip(base, kept, strict=True)]
        base = [min(b, len(p) - 5) for b, p in zip(base, prompts, strict=True)]

    # anchor, a wrong sibling, the right child, its child
    ids = torch.stack(
        [torch.stack([p[b], p[b], p[b + 1], p[b + 2]]) for p, b in zip(prompts, base, strict=True)]
    )
    depths = torch.tensor([0, 1, 1, 2], device=device).expand(len(prompts), -1)
    sees = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    ancestors = torch.tensor(sees, dtype=torch.bool, device=device).expand(len(prompts), -1, -1)
    start = torch.tensor(base, device=device)
    step = Step(rows, ids, start, max(base) + 4, depths=depths, ancestors=ancestors)
    found = _given(reference.forward(kv, step, _NO_FEATURES, True).logits)
    for row, first in enumerate(base):
        for offset, column in enumerate((0, 2, 3)):
            pieces[row][first + offset] = found[row, column]
    kv.compact(rows, start, torch.tensor([[1, 2]], device=device).expand(len(prompts), -1))
    base = [b + 3 for b in base]
    while any(b < len(p) for b, p in zip(base, prompts, strict=True)):
        _run_chain(reference, kv, prompts, base, pieces, width=4)
        base = [min(b + 4, len(p)) for b, p in zip(base, prompts, strict=True)]
    return [torch.stack([piece[i] for i in range(len(piece))]) for piece in pieces]


def _run_chain(
    reference: HFDoor,
    kv: KVBuffers,
    prompts: list[Tensor],
    base: list[int],
    pieces: list[dict[int, Tensor]],
    *,
    width: int,
) -> None:
    device = prompts[0].device
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    for row, (prompt, first) in enumerate(zip(prompts, base, strict=True)):
        here = prompt[first : first + width]
        ids[row, : len(here)] = here
    rows = torch.arange(len(prompts), device=device)
    step = Step(rows, ids, torch.tensor(base, device=device), max(base) + width)
    found = _given(reference.forward(kv, step, _NO_FEATURES, True).logits)
    for row, (prompt, first) in enumerate(zip(prompts, base, strict=True)):
        for column in range(min(width, len(prompt) - first)):
            pieces[row][first + column] = found[row, column]


def _is_row_invariant(door: Door, kv: KVBuffers, prompts: list[Tensor]) -> bool:
    """Tell whether a pass 5 tokens wide equals 5 passes of one token, bit for bit.

    Passes look at as many slots as decoding lets them, alone and in a batch: where this holds,
    speculative output must equal plain decoding without any tolerance.
    """
    device = prompts[0].device
    ids = torch.stack([prompt[:11] for prompt in prompts])

    def logits(rows: Int[Tensor, " R"], start: int, stop: int) -> Float[Tensor, "R T V"]:
        base = torch.full_like(rows, start)
        step = Step(rows, ids[rows, start:stop], base, stop)
        return _given(door.forward(kv, step, _NO_FEATURES, True).logits)

    is_equal = True
    for count in (1, len(prompts)):  # however one ends: processes may have to run as many passes
        rows = torch.arange(count, device=device)
        logits(rows, 0, 6)
        wide = logits(rows, 6, 11)
        narrow = torch.cat([logits(rows, t, t + 1) for t in range(6, 11)], dim=1)
        is_equal &= torch.equal(wide, narrow)
    return is_equal


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Give the largest (in half precision: the median) difference of a position, relative."""
    largest = max(float(e.abs().max()) for e in expected)
    gaps = [(f - e).abs().amax(-1).double() for f, e in zip(found, expected, strict=True)]
    each = torch.cat(gaps)
    one = each.median() if expected[0].dtype in _TYPICAL_ONLY else each.max()
    return float(one) / largest


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "asked for, so given"
    return tensor
