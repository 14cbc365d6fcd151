"""Packed rows attend in pieces as by one dense mask, and nothing of the size of T x T is made."""

from dataclasses import replace

import pytest
import torch
from fast_families import FAST_FAMILIES
from largest_tensor import LargestTensor

from draftlab.targets import packed_attention
from draftlab.targets.attention import attend, tile_mask
from draftlab.targets.fast import FastDoor
from draftlab.targets.features import FeatureRequest
from draftlab.targets.packed_attention import PackedAttention
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target

# lengths of samples, the rest of a row is padding: pieces end inside samples, at their ends, and in
# padding; a row without any sample
ROWS = ([9, 1, 7, 13], [31], [3, 3, 3, 3, 3], [])
WIDTH = 33
REQUEST = FeatureRequest((1, 4), wants_final=True)
HEADS, KV_HEADS, KEY_WIDTH, VALUE_WIDTH = 6, 2, 8, 5


def packed_step(rows=ROWS, length=WIDTH, seed=0):
    """Random tokens in rows of samples of some lengths."""
    segments, places = torch.full((len(rows), length), -1), torch.zeros(len(rows), length).long()
    for row, lengths in enumerate(rows):
        start = 0
        for number, count in enumerate(lengths):
            segments[row, start : start + count] = number
            places[row, start : start + count] = torch.arange(count)
            start += count
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 261, segments.shape, generator=generator)
    zeros = torch.zeros(len(rows), dtype=torch.long)
    return Step(torch.arange(len(rows)), ids, zeros, length, places, segments=segments)


def as_a_tree(step):
    """The same step with who sees whom written out."""
    return replace(step, segments=None, ancestors=step.visible(None))


def randoms(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.requires_grad_() for x in made]


def attention_inputs(dtype=torch.float64, heads=HEADS):
    near = (len(ROWS), KV_HEADS, WIDTH)
    query = (len(ROWS), heads, WIDTH, KEY_WIDTH)
    return randoms(query, (*near, KEY_WIDTH), (*near, VALUE_WIDTH), (heads,), dtype=dtype)


def by_one_mask(step, query, keys, values, window, **scoring):
    mask = tile_mask(step.visible(window), query.shape[1] // keys.shape[1])
    return attend(query, keys, values, mask, **scoring)


# ---------------------------------------------------------------- the mask written out


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_a_column_sees_its_own_sample_up_to_itself_and_padding_only_itself(window):
    step = packed_step()
    seen = step.visible(window)
    reach = window or WIDTH
    for row, samples in enumerate(step.segments.tolist()):
        for i, own in enumerate(samples):
            near = [j for j in range(i + 1) if samples[j] == own and i - j < reach]
            assert seen[row, i].nonzero().flatten().tolist() == (near if own >= 0 else [i])


def test_samples_and_a_tree_together_or_a_memory_in_use_are_refused():
    step = packed_step()
    with pytest.raises(AssertionError, match="not by both"):
        replace(step, ancestors=step.visible(None))
    with pytest.raises(AssertionError, match="fresh memory"):
        replace(step, base=step.base + 1)
    with pytest.raises(AssertionError, match="their own columns alone"):
        replace(step, live=WIDTH + 1)


# ---------------------------------------------------------------- pieces against the mask


@pytest.mark.parametrize("columns", [1, 4, 8, 64])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_pieces_attend_as_by_one_mask_and_so_do_their_gradients(
    monkeypatch, columns, window, softcap, has_sinks
):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", columns)
    step = packed_step()
    query, keys, values, sinks = attention_inputs()
    scoring = {"scale": 0.4, "softcap": softcap, "sinks": sinks if has_sinks else None}
    expected = by_one_mask(step, query, keys, values, window, **scoring)
    packed = PackedAttention(step.segments)
    found = packed.attend(query, keys, values, window=window, **scoring)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        kept = packed.attend(query, keys, values, window=window, **scoring)
    assert torch.equal(kept, found)
    weights = randoms(found.shape)[0].detach()
    inputs = [query, keys, values, *([sinks] if has_sinks else [])]
    for got, wanted in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("heads", [2, 8])
def test_any_number_of_query_heads_in_float32_is_close(monkeypatch, heads):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 7)
    step = packed_step()
    query, keys, values, _ = attention_inputs(torch.float32, heads)
    for window in (None, 5):
        expected = by_one_mask(step, query, keys, values, window, scale=0.4)
        packed = PackedAttention(step.segments)
        found = packed.attend(query, keys, values, window=window, scale=0.4)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_piece_that_saw_one_key_of_the_sample_before_would_be_seen(monkeypatch):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 8)
    step = packed_step()
    query, keys, values, _ = attention_inputs()
    expected = by_one_mask(step, query, keys, values, None, scale=0.4)
    wrong = step.segments.clone()
    wrong[0, 16] = 3  # the last column of sample 2
    found = PackedAttention(wrong).attend(query, keys, values, window=None, scale=0.4)
    off = (found - expected).abs().amax((2, 3))
    assert (off[0, 17:30] > 1e-3).all()
    assert torch.equal(
        found[1:],
        PackedAttention(step.segments).attend(query, keys, values, window=None, scale=0.4)[1:],
    )


@pytest.mark.parametrize("room", [0, 300, 1 << 24])
def test_masks_made_again_are_those_that_were_kept(monkeypatch, room):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 8)
    monkeypatch.setattr(packed_attention, "_KEPT_MASKS", room)
    step = packed_step()
    query, keys, values, _ = attention_inputs()
    packed = PackedAttention(step.segments)
    for window in (None, 3, None, 3):
        expected = by_one_mask(step, query, keys, values, window, scale=0.4)
        found = packed.attend(query, keys, values, window=window, scale=0.4)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert sum(mask.numel() for mask in packed._kept.values()) <= room


def test_what_other_samples_hold_changes_nothing_and_gets_no_gradient(monkeypatch):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 8)
    step = packed_step()
    query, keys, values, _ = attention_inputs()
    packed = PackedAttention(step.segments)
    before = packed.attend(query, keys, values, window=None, scale=0.4)
    mine = step.segments == 2
    others = ~mine.unsqueeze(1).unsqueeze(3)
    changed = packed.attend(query, keys + 5 * others, values - 3 * others, window=None, scale=0.4)
    torch.testing.assert_close(changed[mine], before[mine], rtol=0, atol=1e-12)
    for grad in torch.autograd.grad(before[mine].sum(), [keys, values]):
        assert grad.transpose(1, 2)[~mine].abs().max() == 0


def test_autocast_attends_in_bfloat16_and_stays_near_float32(monkeypatch):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 8)
    step = packed_step()
    query, keys, values, _ = attention_inputs(torch.float32)
    packed = PackedAttention(step.segments)
    exact = packed.attend(query, keys, values, window=None, scale=0.4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # as layers give them: a projection has the narrow type, a rotation the wide one
        found = packed.attend(query, keys, values.bfloat16(), window=None, scale=0.4)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=0.05)
    inputs = [query, keys, values]
    wanted = torch.autograd.grad(exact.square().sum(), inputs)
    got = torch.autograd.grad(found.float().square().sum(), inputs)
    for found_grad, grad in zip(got, wanted, strict=True):
        assert found_grad.dtype == torch.float32
        torch.testing.assert_close(found_grad, grad, rtol=0.1, atol=0.2)


def test_for_gradients_the_inputs_alone_are_kept(monkeypatch):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 8)
    step = packed_step()
    query, keys, values, sinks = attention_inputs()
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        PackedAttention(step.segments).attend(
            query, keys, values, window=None, scale=0.4, sinks=sinks
        )
    assert sizes == [x.numel() for x in (query, keys, values, sinks)]


# ---------------------------------------------------------------- through the doors


def outputs(target, door, step):
    kv = target.open_kv(*step.ids.shape)
    with torch.inference_mode():
        out = door.forward(kv, step, REQUEST, True)
    return [out.logits, out.features.taps, out.features.final, kv.data]


@pytest.mark.parametrize("columns", [1, 7, 64])
def test_every_family_runs_packed_rows_as_by_one_mask(monkeypatch, target, tolerance, columns):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", columns)
    step = packed_step()
    found = outputs(target, target.reference, step)
    for got, wanted in zip(found, outputs(target, target.reference, as_a_tree(step)), strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
        if columns == 64:
            assert torch.equal(got, wanted), "one piece is one call, as it always was"


@pytest.mark.parametrize("columns", [1, 7, 64])
@pytest.mark.parametrize("case", FAST_FAMILIES)
def test_the_fast_door_runs_packed_rows_as_by_one_mask(monkeypatch, case, columns):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", columns)
    family, sizes = FAST_FAMILIES[case]
    target = tiny_target(family, **sizes)
    with torch.inference_mode():
        door = FastDoor(target.model, target.config, target.report["windows"])
    step = packed_step()
    found = outputs(target, door, step)
    for got, wanted in zip(found, outputs(target, door, as_a_tree(step)), strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)
    for got, wanted in zip(found, outputs(target, target.reference, step), strict=True):
        # transformers takes norms and angles in float32 whatever the weights are
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_in_float32_packed_rows_are_close(monkeypatch, family):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 7)
    target, step = tiny_target(family, torch.float32), packed_step()
    by_mask = outputs(target, target.reference, as_a_tree(step))
    for got, wanted in zip(outputs(target, target.reference, step), by_mask, strict=True):
        assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_some_layers_alone_run_packed_rows_as_by_one_mask(monkeypatch):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 7)
    target, step = tiny_target("mistral"), packed_step()
    with torch.inference_mode():
        door = FastDoor(target.model, target.config, target.report["windows"])
    for way in (door, target.reference):
        hidden = []
        for chosen in (step, as_a_tree(step)):
            with torch.inference_mode():
                hidden.append(way.run_layers(target.open_kv(*step.ids.shape), chosen, (0, 2)))
        torch.testing.assert_close(*hidden, rtol=0, atol=1e-9)


# ---------------------------------------------------------------- memory


def largest_of(family, step, is_fast):
    target = tiny_target(family, torch.float32, num_hidden_layers=2)
    door = target.reference
    if is_fast:
        with torch.inference_mode():
            door = FastDoor(target.model, target.config, target.report["windows"])
    kv = target.open_kv(*step.ids.shape)
    with torch.inference_mode(), LargestTensor() as largest:
        door.forward(kv, step, FeatureRequest(wants_final=True), False)
    return largest.elements


@pytest.mark.parametrize("samples", [[2048], [700, 100, 1200, 40]])
@pytest.mark.parametrize(
    ("family", "is_fast"),
    [("llama", False), ("llama", True), ("mistral", True), ("gemma3", False), ("gpt_oss", False)],
)
def test_a_pass_over_2048_columns_makes_nothing_of_their_square(family, is_fast, samples):
    step = packed_step([samples], 2048)
    assert 0 < largest_of(family, step, is_fast) < 2048**2 / 4


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_count_of_elements_finds_a_square(is_fast):
    step = as_a_tree(packed_step([[512]], 512))
    assert largest_of("llama", step, is_fast) >= 512**2
