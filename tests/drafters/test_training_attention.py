"""Training attention against one dense matrix over all keys of all depths or blocks."""

from pathlib import Path

import pytest
import torch
import yaml
from eagle_kit import make_batch, random_tokens, samples
from largest_tensor import LargestTensor
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from draftlab.drafters import _spans, _training_attention
from draftlab.drafters._spans import Spans, block_spans, past_spans
from draftlab.drafters._training_attention import (
    attend_blocks,
    attend_unrolled,
    context_reader,
    read_by_flex,
    read_by_pieces,
)
from draftlab.drafters.base import drafter_class
from draftlab.randomness import Noise
from draftlab.settings.base import parse_settings
from draftlab.targets.features import TargetFeatures
from draftlab.targets.tiny import tiny_target

CONF = Path(__file__).parents[2] / "conf" / "drafter"
HEADS, KV_HEADS, WIDTH = 6, 2, 16
# two packed rows: samples of 9, 1 and 7 positions, the other one of 14, then padding
SEGMENTS = torch.tensor([[0] * 9 + [1] + [2] * 7 + [-1] * 3, [0] * 14 + [-1] * 6])
INDEX = torch.tensor([[2, 3, 8, 9, 10, 12, 16], [0, 1, 2, 7, 11, 13, 15]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def randoms(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return [x.requires_grad_() for x in made]


def past_mask(segments, index):
    """True where a row sees a position, pair by pair."""
    mask = torch.zeros(*index.shape, segments.shape[1], dtype=torch.bool)
    for b, line in enumerate(index.tolist()):
        for a, t in enumerate(line):
            for k in range(t + 1):
                mask[b, a, k] = segments[b, k] == segments[b, t]
    return mask


def dense(queries, keys, values, mask):
    """Attend by one matrix over all keys: [B A Hq D], [B T H D], [B A T]."""
    groups = queries.shape[2] // keys.shape[2]
    keys, values = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (keys, values))
    scores = queries.transpose(1, 2) @ keys.transpose(2, 3) / queries.shape[3] ** 0.5
    probs = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
    return (probs @ values).transpose(1, 2).flatten(2)


def dense_unrolled(queries, keys, values, mask, own):
    itself = torch.eye(queries.shape[1], dtype=torch.bool).expand(queries.shape[0], -1, -1)
    mask = torch.cat([mask, *[itself] * len(own)], dim=2)
    keys, values = (torch.cat([x, *(o[i] for o in own)], 1) for i, x in enumerate((keys, values)))
    return dense(queries, keys, values, mask)


def dense_blocks(queries, context, own, mask, causal):
    _, blocks, slots = queries.shape[:3]
    inside = torch.ones(slots, slots, dtype=torch.bool)
    near = torch.block_diag(*[inside.tril() if causal else inside] * blocks)
    mask = torch.cat([mask, near.expand(len(mask), -1, -1)], dim=2)
    keys, values = (torch.cat([c, o.flatten(1, 2)], 1) for c, o in zip(context, own, strict=True))
    mixed = dense(queries.flatten(1, 2), keys, values, mask)
    return mixed.unflatten(1, (blocks, slots))


def assert_equal_with_gradients(got, expected, inputs, atol=1e-10):
    assert torch.allclose(got, expected, atol=atol, rtol=0)
    weights = randoms(got.shape, dtype=got.dtype, seed=9)[0].detach()
    for found, wanted in zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(found, wanted, atol=atol, rtol=0)


def unrolled_inputs(depths, rows=7, length=20, dtype=torch.float64):
    queries, keys, values, *own = randoms(
        (2, rows, HEADS, WIDTH),
        *[(2, length, KV_HEADS, WIDTH)] * 2,
        *[(2, rows, KV_HEADS, WIDTH)] * (2 * depths),
        dtype=dtype,
    )
    return queries, keys, values, list(zip(own[::2], own[1::2], strict=True))


# ---------------------------------------------------------------- equal to the dense matrix


@pytest.mark.parametrize("piece", [1, 3, 64])
@pytest.mark.parametrize("depths", [0, 1, 3])
def test_unrolled_rows_attend_as_by_one_matrix_over_all_depths(monkeypatch, depths, piece):
    monkeypatch.setattr(_spans, "_PIECE_ROWS", piece)
    queries, keys, values, own = unrolled_inputs(depths)
    got = attend_unrolled(queries, keys, values, past_spans(SEGMENTS, INDEX), own)
    expected = dense_unrolled(queries, keys, values, past_mask(SEGMENTS, INDEX), own)
    inputs = [queries, keys, values, *(x for pair in own for x in pair)]
    assert_equal_with_gradients(got, expected, inputs)


def test_rows_may_come_in_any_order():
    queries, keys, values, own = unrolled_inputs(1)
    index = INDEX[:, [4, 0, 6, 2, 5, 1, 3]]
    got = attend_unrolled(queries, keys, values, past_spans(SEGMENTS, index), own)
    expected = dense_unrolled(queries, keys, values, past_mask(SEGMENTS, index), own)
    assert_equal_with_gradients(got, expected, [queries, keys, values])


@pytest.mark.parametrize("piece", [2, 64])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_attend_as_by_one_matrix_over_all_blocks(monkeypatch, causal, window, piece):
    monkeypatch.setattr(_spans, "_PIECE_ROWS", piece)
    slots = 4
    inputs = randoms(
        (2, 7, slots, HEADS, WIDTH),
        *[(2, 20, KV_HEADS, WIDTH)] * 2,
        *[(2, 7, slots, KV_HEADS, WIDTH)] * 2,
    )
    queries, context, own = inputs[0], tuple(inputs[1:3]), tuple(inputs[3:])
    mask = past_mask(SEGMENTS, INDEX).unsqueeze(2).repeat(1, 1, slots, 1)
    for b, line in enumerate(INDEX.tolist()):
        for a, t in enumerate(line):
            mask[b, a, :, t] = False  # the anchor itself is slot 0
            for j in range(slots if window else 0):
                mask[b, a, j, : max(t + j - window + 1, 0)] = False
    assert not mask.any(-1).all(), "one block has nothing before it"
    spans = block_spans(SEGMENTS, INDEX, slots, window)
    got = attend_blocks(queries, context, own, spans, causal=causal)
    expected = dense_blocks(queries, context, own, mask.flatten(1, 2), causal)
    assert_equal_with_gradients(got, expected, inputs)


def test_a_row_that_sees_nothing_gives_nothing_and_takes_no_gradient():
    queries, keys, values, _ = unrolled_inputs(0, rows=2, length=5)
    spans = Spans(torch.tensor([[0, 3], [2, 2]]), torch.tensor([[4, 3], [1, 2]]), 5)
    mixed, weight = read_by_pieces(queries, keys, values, spans)
    grads = torch.autograd.grad(mixed.sum() + weight.exp().sum(), [queries, keys, values])
    nothing = torch.tensor([[False, True], [True, True]])
    assert (mixed[nothing] == 0).all()
    assert (weight[nothing] == -torch.inf).all()
    assert weight[~nothing].isfinite().all()
    assert (grads[0][nothing] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


def test_packed_samples_never_see_each_other():
    queries, keys, values, own = unrolled_inputs(2)
    spans = past_spans(SEGMENTS, INDEX)
    before = attend_unrolled(queries, keys, values, spans, own)
    mine = SEGMENTS.gather(1, INDEX) == 2
    others = (SEGMENTS != 2).unsqueeze(2).unsqueeze(3)
    changed = attend_unrolled(queries, keys + 5 * others, values - 3 * others, spans, own)
    assert torch.equal(changed[mine], before[mine])
    seen = torch.autograd.grad(before[mine].sum(), [keys, values])
    assert all((grad[SEGMENTS != 2] == 0).all() for grad in seen)
    touched = attend_unrolled(queries, keys + 5 * ~others, values, spans, own)
    assert not torch.equal(touched[mine], before[mine])


# ---------------------------------------------------------------- FlexAttention's way


def spans_of(kind, length=300):
    segments = torch.cat([torch.zeros(140), torch.ones(100), -torch.ones(60)]).long()[:length]
    segments = torch.stack([segments, torch.zeros(length).long()])
    order = torch.arange(length).expand(2, -1)
    if kind == "past":
        return past_spans(segments, order)
    if kind == "past, some rows, out of order":
        return past_spans(segments, order.flip(1)[:, ::2])
    return block_spans(segments, order[:, ::3], 4, 50 if kind == "blocks, window" else None)


KINDS = ["past", "past, some rows, out of order", "blocks", "blocks, window"]


@pytest.mark.parametrize("kind", KINDS)
def test_flex_s_tiles_are_those_of_the_predicate_written_out(kind):
    spans = spans_of(kind)
    got = spans.block_mask
    shape = (*spans.first.shape, spans.num_keys)
    expected = flex_attention.create_block_mask(
        got.mask_mod, shape[0], None, *shape[1:], device="cpu"
    )
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        counts = getattr(expected, name.replace("indices", "num_blocks")).unsqueeze(-1)
        used = torch.arange(getattr(expected, name).shape[-1]) < counts
        assert torch.equal(getattr(got, name)[used], getattr(expected, name)[used]), name
    assert got.seq_lengths == expected.seq_lengths
    keys = torch.arange(spans.num_keys)
    mask = (keys >= spans.first.unsqueeze(2)) & (keys < spans.end.unsqueeze(2))
    written = flex_attention.create_mask(got.mask_mod, shape[0], 1, *shape[1:], device="cpu")
    assert torch.equal(written[:, 0], mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["past, some rows, out of order", "blocks, window"])
def test_flex_reads_what_pieces_read_and_so_are_its_gradients(monkeypatch, kind):
    # its eager form has gradients on CPUs, though its front door says no
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    spans = spans_of(kind, length=40)
    rows = spans.first.shape[1]
    inputs = randoms((2, rows, HEADS, WIDTH), *[(2, 40, KV_HEADS, WIDTH)] * 2)
    mixed, weight = read_by_pieces(*inputs, spans)
    by_flex, flex_weight = read_by_flex(*inputs, spans)
    sees = spans.first < spans.end
    both = [
        torch.cat([x[sees].flatten(), y[sees].flatten()])
        for x, y in ((by_flex, flex_weight), (mixed, weight))
    ]
    assert_equal_with_gradients(*both, inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_flex_reads_what_pieces_read_and_so_are_its_gradients(kind):
    spans = spans_of(kind)
    spans = Spans(spans.first.cuda(), spans.end.cuda(), spans.num_keys)
    rows = spans.first.shape[1]
    shapes = (2, rows, HEADS, WIDTH), *[(2, 300, KV_HEADS, WIDTH)] * 2
    inputs = [x.detach().cuda().requires_grad_() for x in randoms(*shapes, dtype=torch.float32)]
    sees = spans.first < spans.end
    found = []
    for read in (read_by_pieces, read_by_flex):
        mixed, weight = read(*inputs, spans)
        # rows that see nothing have no gradient to compare
        total = mixed[sees].square().sum() + weight[sees].sin().sum()
        found.append([mixed[sees], weight[sees], *torch.autograd.grad(total, inputs)])
    for by_pieces, by_flex in zip(*found, strict=True):
        assert torch.allclose(by_pieces, by_flex, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "can_build", "reader"),
    [
        ("cpu", torch.float32, 64, True, "pieces"),
        ("cuda", torch.bfloat16, 64, True, "flex"),
        ("cuda", torch.float32, 128, True, "flex"),
        ("cuda", torch.float64, 64, True, "pieces"),
        ("cuda", torch.float32, 8, True, "pieces"),
        ("cuda", torch.bfloat16, 64, False, "pieces"),
    ],
)
def test_flex_is_chosen_where_its_kernels_can_be_built_and_serve(
    monkeypatch, device, dtype, width, can_build, reader
):
    monkeypatch.setattr(_training_attention, "has_compiler", lambda: can_build)
    assert context_reader(torch.device(device), dtype, width) == reader


# ---------------------------------------------------------------- memory


def long_batch(length):
    """Pack two answers of half the length."""
    half = length // 2
    return make_batch([(random_tokens(half, seed), half // 4) for seed in (1, 2)], length)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle3", {"unroll_steps": 2}),
        ("peagle", {"num_depths": 2, "num_draft_tokens": 2, "num_layers": 2}),
        ("dflash", {"num_layers": 1, "sliding_window": 100}),
        ("draft_model", {}),
    ],
)
def test_training_on_4096_positions_makes_nothing_of_their_square(kind, changes):
    length = 4096
    drafter = build(tiny_target(dtype=torch.float32), kind, **changes)
    batch = long_batch(length)
    taps = len(drafter.needs.tap_layers)
    shapes = (1, length, taps, 64), (1, length, 64)
    features = TargetFeatures(*(x.detach() for x in randoms(*shapes, dtype=torch.float32)))
    with LargestTensor() as largest:
        drafter(batch, features, Noise(0)).total.backward()
    assert 0 < largest.elements < length**2 / 4


def test_the_count_of_elements_finds_a_square():
    queries, keys, values, own = unrolled_inputs(2, rows=20)
    order = torch.arange(20).expand(2, -1)
    with LargestTensor() as largest:
        dense_unrolled(queries, keys, values, past_mask(SEGMENTS, order), own)
    assert largest.elements >= 2 * HEADS * 20 * 60


# ---------------------------------------------------------------- in the drafters


def build(target, kind, **changes):
    """Build a drafter whose parameters are all away from their start."""
    data = yaml.safe_load((CONF / f"{kind}.yaml").read_text(encoding="utf-8")) | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter_type = drafter_class(kind)
        drafter = drafter_type(parse_settings(drafter_type.settings_class, data), target.view)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return drafter


def by_one_mask(queries, keys, values, spans):
    """Do what `read_context` does with a T x T mask."""
    order = torch.arange(spans.num_keys)
    mask = (order >= spans.first.unsqueeze(2)) & (order < spans.end.unsqueeze(2))
    groups = queries.shape[2] // keys.shape[2]
    keys, values = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (keys, values))
    scores = queries.transpose(1, 2) @ keys.transpose(2, 3) / queries.shape[3] ** 0.5
    scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    # softmax of a row of -inf alone has no gradient
    shut = ~mask.any(2).unsqueeze(1).unsqueeze(3)
    probs = scores.masked_fill(shut, 0.0).softmax(-1).masked_fill(shut, 0.0)
    weight = scores.masked_fill(shut, 0.0).logsumexp(-1, keepdim=True).masked_fill(shut, -torch.inf)
    return (probs @ values).transpose(1, 2), weight.squeeze(3).transpose(1, 2)


FAMILIES = {
    "eagle": {"num_layers": 2, "hass_steps": 3, "feature_noise": 0.0},
    "eagle3": {"num_layers": 2, "unroll_steps": 4, "sliding_window": 5},
    "mtp": {},
    "hydra": {"prefix_attention": True},
    "peagle": {"num_layers": 2, "num_depths": 5, "sliding_window": 6},
    "dflash": {"num_layers": 2, "sliding_window": 9},
    "dspark": {"num_layers": 2, "causal": True},
}


def loss_and_gradients(drafter, batch, features):
    drafter.zero_grad()
    loss = drafter(batch, features, Noise(0)).total
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in drafter.parameters())]


@pytest.mark.parametrize("kind", FAMILIES)
def test_losses_and_gradients_of_a_packed_batch_are_those_of_a_dense_mask(
    target, monkeypatch, kind
):
    monkeypatch.setattr(_spans, "_PIECE_ROWS", 8)
    drafter = build(target, kind, **FAMILIES[kind])
    batch = make_batch([*samples(), (random_tokens(26, 4), 3)], 30)
    features = target.read_features(batch, drafter.needs)
    got = loss_and_gradients(drafter, batch, features)
    again = loss_and_gradients(drafter, batch, features)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    monkeypatch.setattr(_training_attention, "read_context", by_one_mask)
    expected = loss_and_gradients(drafter, batch, features)
    assert all(torch.allclose(a, b, atol=1e-10, rtol=0) for a, b in zip(got, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), "both ways ran"


# ---------------------------------------------------------------- what training does with it


def test_activations_computed_again_give_the_same_bits():
    queries, keys, values, own = unrolled_inputs(2)
    inputs = [queries, keys, values, *(x for pair in own for x in pair)]

    def attend(*given):
        pairs = list(zip(given[3::2], given[4::2], strict=True))
        return attend_unrolled(*given[:3], past_spans(SEGMENTS, INDEX), pairs)

    kept = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    forgotten = checkpoint(attend, *inputs, use_reentrant=False)
    again = torch.autograd.grad(forgotten.square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_autocast_attends_in_bfloat16_and_stays_near_float32():
    queries, keys, values, own = unrolled_inputs(2, dtype=torch.float32)
    inputs = [queries, keys, values, *(x for pair in own for x in pair)]
    spans = past_spans(SEGMENTS, INDEX)
    exact = attend_unrolled(queries, keys, values, spans, own)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # as layers give them: a projection has the narrow type, a norm or a rotation the wide one
        got = attend_unrolled(queries, keys, values.bfloat16(), spans, own)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), exact, atol=0.05)
    wanted = torch.autograd.grad(exact.sum(), inputs)
    for found, grad in zip(torch.autograd.grad(got.float().sum(), inputs), wanted, strict=True):
        assert found.dtype == torch.float32
        assert torch.allclose(found, grad, atol=0.1)
