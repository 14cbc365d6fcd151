import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftlab.objectives import chunked
from draftlab.objectives.chunked import chunked_label_probs, chunked_losses, chunked_scores
from draftlab.objectives.named import OBJECTIVES, objective
from draftlab.objectives.rows import score_rows

K, N, D, V = 3, 37, 8, 20
IDS = torch.tensor([0, 2, 3, 5, 7, 11, 13, 17, 19])


def make(num_heads, vocab_ids, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = V if vocab_ids is None else len(vocab_ids)
    hidden = random(K, N, D).requires_grad_()
    heads = [random(width, D).requires_grad_() for _ in range(num_heads)]
    weights = random(K, N).abs() * (torch.rand(K, N, generator=generator) > 0.3)
    target_head = random(V, D)
    rest = {
        "target_final": random(N, D),
        "target_head": lambda final: final @ target_head.T,
        "labels": torch.randint(0, V, (N,), generator=generator),
        "weights": weights,
        "vocab_ids": vocab_ids,
    }
    return hidden, heads, rest


def plain(chosen, hidden, heads, rest, judged=slice(None)):
    logits = rest["target_head"](rest["target_final"])
    total, sums = 0.0, []
    for k in range(K):
        draft = hidden[k] @ heads[k if len(heads) > 1 else 0].T
        scores = score_rows(chosen, logits, draft, rest["labels"], rest["vocab_ids"])
        counts = (rest["weights"][k] > 0)[judged]
        total = total + (scores.loss * rest["weights"][k]).sum()
        sums.append(
            [
                scores.loss[judged][counts].sum(),
                scores.hit[judged][counts].sum(),
                scores.overlap[judged][counts].sum(),
                counts.sum(),
            ]
        )
    return total, torch.tensor([[x.item() for x in row] for row in sums], dtype=torch.float64)


def kept_rows(rest):
    """The target's head rows of the draft vocabulary."""
    return rest["target_head"](torch.eye(D, dtype=torch.float64)).T[rest["vocab_ids"]]


def stacked(scores):
    return torch.stack([scores.loss_sum, scores.hit_sum, scores.overlap_sum, scores.count], dim=1)


@pytest.mark.parametrize("chunk_rows", [1, 10, 100])
@pytest.mark.parametrize("vocab_ids", [None, IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize("num_heads", [1, K])
def test_chunking_changes_neither_loss_nor_gradient(num_heads, vocab_ids, chunk_rows):
    hidden, heads, rest = make(num_heads, vocab_ids)
    chosen = objective("lk_hybrid")
    expected, sums = plain(chosen, hidden, heads, rest)
    expected_grads = torch.autograd.grad(2 * expected, [hidden, *heads])
    scores = chunked_scores(chosen, hidden, heads, **rest, chunk_rows=chunk_rows)
    grads = torch.autograd.grad(2 * scores.total, [hidden, *heads])
    assert torch.allclose(scores.total, expected)
    assert torch.allclose(stacked(scores), sums)
    for grad, other in zip(grads, expected_grads, strict=True):
        assert torch.allclose(grad, other)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_objective_has_the_plain_gradient(name):
    hidden, heads, rest = make(1, IDS, seed=3)
    expected, _ = plain(objective(name), hidden, heads, rest)
    scores = chunked_scores(objective(name), hidden, heads, **rest, chunk_rows=8)
    got = torch.autograd.grad(scores.total, hidden)[0]
    assert torch.allclose(got, torch.autograd.grad(expected, hidden)[0])


@pytest.mark.parametrize("chunk_rows", [1, 10, 100])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_kept_rows_of_the_head_teach_what_the_whole_head_does(name, chunk_rows):
    hidden, heads, rest = make(K, IDS, seed=5)
    whole = chunked_scores(objective(name), hidden, heads, **rest)
    expected = torch.autograd.grad(whole.total, [hidden, *heads])
    scores = chunked_scores(
        objective(name),
        hidden,
        heads,
        **rest,
        kept_head=kept_rows(rest),
        judged=torch.arange(N) % 8 == 0,
        chunk_rows=chunk_rows,
    )
    assert torch.allclose(scores.total, whole.total)
    for grad, other in zip(
        torch.autograd.grad(scores.total, [hidden, *heads]), expected, strict=True
    ):
        assert torch.allclose(grad, other)


@pytest.mark.parametrize("chunk_rows", [1, 10, 100])
@pytest.mark.parametrize("every", [1, 3, 8])
def test_sums_over_judged_predictions_are_those_of_the_whole_head(every, chunk_rows):
    hidden, heads, rest = make(1, IDS, seed=6)
    judged = torch.arange(N) % every == 0
    chosen = objective("lk_hybrid")
    _, sums = plain(chosen, hidden, heads, rest, judged)
    scores = chunked_scores(
        chosen,
        hidden,
        heads,
        **rest,
        kept_head=kept_rows(rest),
        judged=judged,
        chunk_rows=chunk_rows,
    )
    assert (sums[:, 3] > 0).all()
    assert torch.allclose(stacked(scores), sums)


@pytest.mark.parametrize("vocab_ids", [None, IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize("num_heads", [1, K])
def test_predictions_of_weight_zero_meet_neither_head(num_heads, vocab_ids):
    """Counted in multiplications: those of both heads, and of both gradients."""
    hidden, heads, rest = make(num_heads, vocab_ids)
    judged = torch.arange(N) % 8 == 0
    if vocab_ids is not None:
        rest |= {"kept_head": kept_rows(rest), "judged": judged}

    def flops(weights):
        with FlopCounterMode(display=False) as counter:
            chunked_scores(
                objective("forward_kl"), hidden, heads, **rest | {"weights": weights}, chunk_rows=10
            )
        return counter.get_total_flops() // (2 * D)

    few = (torch.rand(K, N, generator=torch.Generator().manual_seed(1)) > 0.9).double()
    width = heads[0].shape[0]
    tokens, shown = int(few.any(0).sum()), int((few.any(0) & judged).sum())
    both_heads = tokens * width + (0 if vocab_ids is None else shown * V)
    assert 0 < few.sum() < 0.2 * K * N
    assert tokens < 0.5 * N
    # of a prediction: its logits, and the gradient of its state
    assert flops(few) == both_heads + 2 * width * int(few.sum())
    assert flops(torch.ones(K, N, dtype=torch.float64)) > 5 * flops(few)


def test_what_stands_where_there_is_no_prediction_is_not_read():
    hidden, heads, rest = make(K, None)
    none = rest["weights"] == 0
    empty = hidden.detach().masked_fill(none.unsqueeze(-1), torch.nan).requires_grad_()
    chosen = objective("forward_kl")
    expected = torch.autograd.grad(chunked_scores(chosen, hidden, heads, **rest).total, hidden)[0]
    grad = torch.autograd.grad(chunked_scores(chosen, empty, heads, **rest).total, empty)[0]
    assert none.any()
    assert torch.equal(grad, expected)
    assert (grad[none] == 0).all()


def test_the_whole_head_runs_over_judged_predictions_only():
    hidden, heads, rest = make(1, IDS)
    whole_head, seen, kept_head = rest["target_head"], [], kept_rows(rest)
    rest["target_head"] = lambda final: seen.append(final) or whole_head(final)
    judged = torch.arange(N) % 8 == 0
    chunked_scores(
        objective("forward_kl"), hidden, heads, **rest, kept_head=kept_head, judged=judged
    )
    assert torch.equal(torch.cat(seen), rest["target_final"][judged])


def test_none_judged_gives_a_loss_and_sums_of_nothing():
    hidden, heads, rest = make(1, IDS)
    expected, _ = plain(objective("forward_kl"), hidden, heads, rest)
    none = torch.zeros(N, dtype=torch.bool)
    scores = chunked_scores(
        objective("forward_kl"), hidden, heads, **rest, kept_head=kept_rows(rest), judged=none
    )
    assert torch.allclose(scores.total, expected)
    assert (stacked(scores) == 0).all()


def test_a_perfect_head_over_kept_rows_scores_the_coverage_of_judged_choices_not_one():
    """Case O-26: a third of the target's choices lie outside the draft vocabulary."""
    choices = torch.tensor([IDS[0], IDS[3], IDS[5], IDS[8], 1, 4] * 8)
    width = torch.eye(V, dtype=torch.float64)
    target_head, final = 9.0 * width, width[choices]
    scores = chunked_scores(
        objective("forward_kl"),
        final.unsqueeze(0),
        [target_head[IDS]],
        target_final=final,
        target_head=lambda x: x @ target_head.T,
        labels=choices,
        weights=torch.ones(1, len(choices), dtype=torch.float64),
        vocab_ids=IDS,
        kept_head=target_head[IDS],
        judged=torch.arange(len(choices)) < 36,
    )
    assert scores.count.tolist() == [36]
    assert scores.hit_sum.tolist() == [24]
    # a draft equal to the restricted law keeps all the mass inside, and no more
    inside = target_head[choices[:36]].softmax(-1)[:, IDS].sum()
    assert scores.overlap_sum.item() == pytest.approx(inside.item())


def test_a_frozen_head_gets_no_gradient():
    hidden, heads, rest = make(1, None)
    scores = chunked_scores(objective("forward_kl"), hidden, [heads[0].detach()], **rest)
    scores.total.backward()
    assert hidden.grad.abs().sum() > 0


def test_without_gradients_only_the_sums_are_computed():
    hidden, heads, rest = make(1, None)
    with torch.no_grad():
        scores = chunked_scores(objective("forward_kl"), hidden, heads, **rest)
    assert not scores.total.requires_grad
    assert scores.total > 0


def test_no_predictions_give_a_zero_that_can_be_differentiated():
    hidden = torch.zeros(K, 0, D, requires_grad=True)
    head = torch.zeros(V, D, requires_grad=True)
    scores = chunked_scores(
        objective("forward_kl"),
        hidden,
        [head],
        target_final=torch.zeros(0, D),
        target_head=lambda final: final @ head.detach().T,
        labels=torch.zeros(0, dtype=torch.int64),
        weights=torch.zeros(K, 0),
        vocab_ids=None,
    )
    scores.total.backward()
    assert scores.total.item() == 0
    assert (head.grad == 0).all()


def test_autocast_runs_the_heads_in_its_dtype_and_the_loss_in_float32():
    hidden, heads, rest = make(1, None)
    exact = chunked_scores(objective("forward_kl"), hidden, heads, **rest).total
    hidden32 = hidden.detach().float().requires_grad_()
    rest["weights"] = rest["weights"].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = chunked_scores(
            objective("forward_kl"), hidden32, [heads[0].detach().float()], **rest
        )
    scores.total.backward()
    assert scores.total.dtype == torch.float32
    assert scores.total.item() == pytest.approx(exact.item(), rel=2e-2)
    assert hidden32.grad.dtype == torch.float32


@pytest.mark.parametrize("vocab_ids", [None, IDS], ids=["whole", "reduced"])
def test_single_losses_and_label_probabilities_are_the_plain_ones(vocab_ids):
    hidden, heads, rest = make(K, vocab_ids, seed=7)
    rest.pop("weights")
    chosen = objective("0.1*cross_entropy+0.9*tv")
    logits = rest["target_head"](rest["target_final"])
    losses = chunked_losses(chosen, hidden, heads, **rest, chunk_rows=8)
    probs = chunked_label_probs(
        hidden, heads, labels=rest["labels"], vocab_ids=vocab_ids, chunk_rows=8
    )
    for k in range(K):
        draft = hidden[k] @ heads[k].T
        plainly = score_rows(chosen, logits, draft, rest["labels"], vocab_ids)
        assert torch.allclose(losses[k], plainly.loss)
        q = torch.zeros(N, V, dtype=torch.float64)
        q[:, slice(None) if vocab_ids is None else vocab_ids] = draft.softmax(-1).detach()
        assert torch.allclose(probs[k], q.gather(1, rest["labels"].unsqueeze(1))[:, 0])
    if vocab_ids is not None:
        kept = chunked_losses(chosen, hidden, heads, **rest, kept_head=kept_rows(rest))
        assert torch.allclose(kept, losses)


def test_label_probabilities_of_predictions_that_are_not_made_are_zero_and_cost_nothing():
    hidden, heads, rest = make(1, None, seed=7)
    made = rest["weights"] > 0
    args = hidden, heads
    labels = {"labels": rest["labels"], "vocab_ids": None}
    every = chunked_label_probs(*args, **labels)
    with FlopCounterMode(display=False) as counter:
        probs = chunked_label_probs(*args, **labels, made=made, chunk_rows=8)
    assert torch.allclose(probs, every * made)
    assert counter.get_total_flops() == 2 * D * V * int(made.sum())


def test_a_head_cast_by_slices_is_the_head_cast_whole(monkeypatch):
    hidden, heads, rest = make(1, IDS, seed=8)
    half = [hidden.detach().bfloat16().requires_grad_(), heads[0].detach().float().requires_grad_()]
    rest |= {"target_final": rest["target_final"].bfloat16(), "weights": rest["weights"].float()}
    target_head = rest["target_head"]
    rest["target_head"] = lambda final: target_head(final.double()).float()

    def run():
        scores = chunked_scores(objective("forward_kl"), half[0], [half[1]], **rest)
        return scores.total, *torch.autograd.grad(scores.total, half)

    whole = run()
    monkeypatch.setattr(chunked, "_CAST_AT_ONCE", 2 * D)
    for one, other in zip(run(), whole, strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm()


def test_the_gradient_of_a_half_precision_head_is_added_up_in_float32():
    """Many small additions to one large number: in bfloat16 all of them would be lost."""
    rows = 1024
    hidden = torch.ones(1, rows, 1, dtype=torch.bfloat16)
    head = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    scores = chunked_scores(
        objective("cross_entropy"),
        hidden,
        [head],
        target_final=torch.zeros(rows, 1),
        target_head=lambda final: torch.zeros(final.shape[0], 2),
        labels=torch.zeros(rows, dtype=torch.int64),
        weights=torch.ones(1, rows),
        vocab_ids=None,
        chunk_rows=2,
    )
    scores.total.backward()
    assert head.grad.flatten().tolist() == [-rows / 2, rows / 2]


def test_gradients_are_there_once():
    hidden, heads, rest = make(1, None)
    scores = chunked_scores(objective("tv"), hidden, heads, **rest)
    scores.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute it again"):
        scores.total.backward()


@pytest.mark.parametrize("name", ["forward_kl", "lk_hybrid"])
def test_in_float32_loss_and_gradients_are_within_a_thousandth_of_the_plain_ones(name):
    """At 512 predictions over 16,000 tokens, of which the draft knows every second."""
    generator = torch.Generator().manual_seed(4)
    rows, width, vocabulary = 512, 32, 16_000
    hidden, final = (torch.randn(1, rows, width, generator=generator) for _ in range(2))
    hidden.requires_grad_()
    target_rows = torch.randn(vocabulary, width, generator=generator)
    ids = torch.arange(0, vocabulary, 2)
    head = torch.randn(len(ids), width, generator=generator).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    weights = torch.rand(1, rows, generator=generator)
    losses = score_rows(
        objective(name), final[0] @ target_rows.T, hidden[0] @ head.T, labels, ids
    ).loss
    plainly = (losses * weights).sum()
    expected = torch.autograd.grad(plainly, [hidden, head])
    scores = chunked_scores(
        objective(name),
        hidden,
        [head],
        target_final=final[0],
        target_head=lambda x: x @ target_rows.T,
        labels=labels,
        weights=weights,
        vocab_ids=ids,
        kept_head=target_rows[ids],
        chunk_rows=100,
    )
    assert scores.total.item() == pytest.approx(plainly.item(), rel=1e-4)
    for grad, other in zip(
        torch.autograd.grad(scores.total, [hidden, head]), expected, strict=True
    ):
        assert (grad - other).norm() <= 1e-3 * other.norm()


_MEASURE = """
import resource, torch
from draftlab.objectives.chunked import chunked_scores
from draftlab.objectives.named import objective

torch.set_num_threads(1)
depths, rows, width, vocabulary = 2, 700, 32, 50_000
head = torch.randn(vocabulary, width, requires_grad=True)
forward_kl = objective("forward_kl")

def chunked(hidden, final, labels):
    return chunked_scores(
        forward_kl, hidden, [head], target_final=final, target_head=lambda x: x @ head.detach().T,
        labels=labels, weights=torch.ones(hidden.shape[:2]), vocab_ids=None,
    ).total

def run(n):
    hidden = torch.randn(depths, n, width, requires_grad=True)
    chunked(hidden, torch.randn(n, width), torch.zeros(n, dtype=torch.int64)).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = run(1)
print(run(rows) - before)
"""


def test_peak_memory_stays_well_under_the_full_logits_of_all_depths():
    """Case O-25: 140 MB for the float32 logits of each of two depths, and several copies plainly."""

    run = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) * 1024 < 0.5 * 2 * 700 * 50_000 * 4
