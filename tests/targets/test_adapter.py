import gc

import pytest
import torch
from transformers import AttentionInterface

from draftlab.errors import ShapeMismatch, UnsupportedTarget
from draftlab.targets.features import FeatureRequest
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target

LENGTHS = (23, 11, 17, 14)


def texts_of(random_ids):
    return [random_ids(length, seed=length) for length in LENGTHS]


def tree_step(texts, base, *, depths=(0, 1, 1, 2, 2), sees=None):
    """Anchor, wrong sibling, right child, its right child, a wrong child of it."""
    sees = sees or [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    ids = torch.stack(
        [
            torch.stack([t[b], (t[b + 1] + 1) % 261, t[b + 1], t[b + 2], (t[b + 2] + 7) % 261])
            for t, b in zip(texts, base, strict=True)
        ]
    )
    rows = len(texts)
    return Step(
        torch.arange(rows),
        ids,
        torch.tensor(base),
        max(base) + 5,
        depths=torch.tensor(depths).expand(rows, -1),
        ancestors=torch.tensor(sees, dtype=torch.bool).expand(rows, -1, -1),
    )


def test_ragged_chains_equal_whole_passes(target, tolerance, random_ids, run_chain, whole_logits):
    texts = texts_of(random_ids)
    expected = whole_logits(target, texts)
    kv = target.open_kv(len(texts), 32)
    base = [0, 0, 0, 0]
    for kept in ([4, 1, 3, 2], [1, 4, 2, 4], [5, 1, 5, 1], [2, 2, 1, 3]):
        logits = run_chain(target, kv, texts, base, 5).logits
        for row, (first, text) in enumerate(zip(base, texts, strict=True)):
            count = min(5, len(text) - first)
            torch.testing.assert_close(
                logits[row, :count], expected[row][first : first + count], rtol=0, atol=tolerance
            )
        base = [b + k for b, k in zip(base, kept, strict=True)]


@pytest.mark.parametrize("chunk", [1, 4, 23])
def test_chunked_prefill_equals_a_whole_pass(
    target, tolerance, random_ids, run_chain, whole_logits, chunk
):
    texts = texts_of(random_ids)
    expected = whole_logits(target, texts)
    kv = target.open_kv(len(texts), 48)
    for first in range(0, 23, chunk):
        base = [min(first, len(t)) for t in texts]
        logits = run_chain(target, kv, texts, base, chunk).logits
        for row, text in enumerate(texts):
            count = max(0, min(chunk, len(text) - base[row]))
            torch.testing.assert_close(
                logits[row, :count],
                expected[row][base[row] : base[row] + count],
                rtol=0,
                atol=tolerance,
            )


def test_a_tree_and_its_compacted_path_equal_whole_passes(
    target, tolerance, random_ids, run_chain, whole_logits
):
    texts = texts_of(random_ids)
    expected = whole_logits(target, texts)
    kv = target.open_kv(len(texts), 32)
    base = [12, 5, 9, 7]
    run_chain(target, kv, texts, [0] * 4, 12)
    logits = target.run(kv, tree_step(texts, base)).logits
    for row, first in enumerate(base):
        torch.testing.assert_close(
            logits[row, [0, 2, 3]], expected[row][first : first + 3], rtol=0, atol=tolerance
        )
    with torch.inference_mode():
        kv.compact(torch.arange(4), torch.tensor(base), torch.tensor([[1, 2, -1]]).expand(4, -1))
    logits = run_chain(target, kv, texts, [b + 3 for b in base], 2).logits
    for row, first in enumerate(base):
        torch.testing.assert_close(
            logits[row], expected[row][first + 3 : first + 5], rtol=0, atol=tolerance
        )


def test_without_compaction_the_path_would_be_wrong(
    target, tolerance, random_ids, run_chain, whole_logits
):
    texts = texts_of(random_ids)
    expected = whole_logits(target, texts)
    kv = target.open_kv(len(texts), 32)
    base = [12, 5, 9, 7]
    run_chain(target, kv, texts, [0] * 4, 12)
    target.run(kv, tree_step(texts, base))
    logits = run_chain(target, kv, texts, [b + 3 for b in base], 2).logits
    for row, first in enumerate(base):
        assert (logits[row] - expected[row][first + 3 : first + 5]).abs().max() > 1e-3


@pytest.mark.parametrize("fault", ["slots as positions", "siblings visible"])
def test_a_faulty_tree_would_be_seen(target, random_ids, run_chain, whole_logits, fault):
    texts = texts_of(random_ids)
    expected = whole_logits(target, texts)
    kv = target.open_kv(len(texts), 32)
    base = [12, 5, 9, 7]
    run_chain(target, kv, texts, [0] * 4, 12)
    wrong = (
        {"depths": (0, 1, 2, 3, 4)}
        if fault == "slots as positions"
        else {"sees": torch.ones(5, 5).tril().int().tolist()}
    )
    logits = target.run(kv, tree_step(texts, base, **wrong)).logits
    for row, first in enumerate(base):
        assert (logits[row, 2:4] - expected[row][first + 1 : first + 3]).abs().max() > 1e-3


def test_dead_slots_may_hold_anything(target, tolerance, random_ids, run_chain, whole_logits):
    texts = texts_of(random_ids)
    expected = whole_logits(target, texts)
    kv = target.open_kv(len(texts), 32)
    base = [9, 4, 7, 2]
    run_chain(target, kv, texts, [0] * 4, 9)
    with torch.inference_mode():
        for row, first in enumerate(base):
            kv.data[:, :, row, first:].normal_(0, 100)
    logits = run_chain(target, kv, texts, base, 3).logits
    for row, first in enumerate(base):
        torch.testing.assert_close(
            logits[row], expected[row][first : first + 3], rtol=0, atol=tolerance
        )


def test_any_rows_in_any_order_give_the_same(targets, random_ids, run_chain):
    target = targets("mistral")
    texts = texts_of(random_ids)
    kv = target.open_kv(len(texts), 32)
    run_chain(target, kv, texts, [0] * 4, 8)
    ids = torch.stack([t[8:10] for t in texts])
    base = torch.full((4,), 8)
    straight = target.run(kv, Step(torch.arange(4), ids, base, 16)).logits
    rows = torch.tensor([3, 1])
    chosen = target.run(kv, Step(rows, ids[rows], base[rows], 16)).logits
    torch.testing.assert_close(chosen, straight[rows], rtol=0, atol=1e-9)


def test_taps_equal_the_hidden_states_of_transformers(target, tolerance, random_ids, run_chain):
    ids = random_ids(1, 12)
    request = FeatureRequest((1, 2, 4), wants_final=True)
    kv = target.open_kv(1, 16)
    found = run_chain(target, kv, [ids[0]], [0], 12, request=request).features
    target.reference.detach()
    try:
        states = target.model(ids, output_hidden_states=True).hidden_states
    finally:
        target.reference.attach()
    for place, tap in enumerate((1, 2)):
        torch.testing.assert_close(found.taps[:, :, place], states[tap], rtol=0, atol=tolerance)
    # transformers' last entry is behind the final norm; ours is before it
    torch.testing.assert_close(found.final, states[4], rtol=0, atol=tolerance)
    assert (found.taps[:, :, 2] - states[4]).abs().max() > 1e-3
    normed = target.view.final_norm(found.taps[:, :, 2])
    torch.testing.assert_close(normed, states[4], rtol=0, atol=tolerance)


def test_final_is_what_the_head_reads(target, random_ids, run_chain):
    seen = []
    head = target.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    kv = target.open_kv(1, 16)
    try:
        found = run_chain(
            target, kv, [random_ids(9)], [0], 9, request=FeatureRequest(wants_final=True)
        )
    finally:
        hook.remove()
    assert torch.equal(seen[0], found.features.final)


def test_features_come_without_logits_when_none_are_wanted(target, random_ids, run_chain):
    request = FeatureRequest((2,), wants_final=True)
    text = random_ids(9)
    kv = target.open_kv(1, 16)
    both = run_chain(target, kv, [text], [0], 9, request=request)
    alone = run_chain(target, kv, [text], [0], 9, request=request, wants_logits=False)
    assert alone.logits is None
    assert torch.equal(alone.features.taps, both.features.taps)
    assert torch.equal(alone.features.final, both.features.final)


def test_nothing_asked_is_nothing_given(targets, random_ids, run_chain):
    target = targets("llama")
    features = run_chain(target, target.open_kv(1, 16), [random_ids(4)], [0], 4).features
    assert features.taps is None
    assert features.final is None


def test_a_step_past_the_capacity_is_refused_with_both_numbers(targets, random_ids):
    target = targets("llama")
    kv = target.open_kv(2, 8)
    step = Step(torch.arange(2), random_ids(2, 4), torch.tensor([6, 0]), 10)
    with pytest.raises(ShapeMismatch, match=r"slot 9 .* capacity 8"):
        target.run(kv, step)


def test_nobody_can_ask_for_one_length(targets):
    layer = targets("llama").reference._cache.layers[0]
    with pytest.raises(UnsupportedTarget, match="one sequence length"):
        layer.get_seq_length()


def test_two_targets_live_side_by_side(random_ids, run_chain):
    first, second = tiny_target("llama", seed=1), tiny_target("llama", seed=2)
    text = random_ids(6)
    a, b = first.open_kv(1, 8), second.open_kv(1, 8)
    before = run_chain(first, a, [text], [0], 6).logits
    other = run_chain(second, b, [text], [0], 6).logits
    assert torch.equal(before, run_chain(first, a, [text], [0], 6).logits)
    assert not torch.equal(before, other)


def test_a_dropped_target_leaves_no_attention_function_behind():
    target = tiny_target("llama", num_hidden_layers=2)
    name = target.model.config._attn_implementation
    assert name in AttentionInterface._global_mapping
    del target
    gc.collect()
    assert name not in AttentionInterface._global_mapping


def test_running_the_model_past_the_target_is_an_error(targets, random_ids):
    with pytest.raises(UnsupportedTarget, match=r"Target\.run"):
        targets("llama").model(random_ids(1, 4))
