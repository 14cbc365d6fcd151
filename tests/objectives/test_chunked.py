import subprocess
import sys

import pytest
import torch

from draftlab.objectives.chunked import chunked_scores
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


_MEASURE = """
import resource, torch
from draftlab.objectives.chunked import chunked_scores
from draftlab.objectives.named import objective

torch.set_num_threads(1)
depths, rows, width, vocabulary = 4, 512, 64, 50_000
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
    """Case O-25: 102 MB for the float32 logits of each of four depths, and several copies plainly."""

    run = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) * 1024 < 0.5 * 4 * 512 * 50_000 * 4
