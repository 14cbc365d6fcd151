"""The law of every place equals the one computed by hand, whatever the batch-mates."""

import pytest
import torch
from sampling_kit import (
    EOS_IDS,
    LAWS,
    VOCAB,
    path_to,
    plain_law,
    random_logits,
    random_parents,
    random_tokens,
)

from draftlab.errors import ConfigError, ShapeMismatch
from draftlab.sampling import (
    ContextTracker,
    Sampling,
    SamplingRows,
    adjust,
    draw,
    greedy_ids,
    process,
    residual,
)

CPU = torch.device("cpu")
NODES = 6


class Batch:
    """As many rows as there are laws, each with its own prompt, answer and tree."""

    def __init__(self, seed: int, nodes: int = NODES) -> None:
        self.laws = LAWS
        rows = len(LAWS)
        self.prompts = [random_tokens(1 + n, seed=seed + n).tolist() for n in range(rows)]
        self.outputs = [random_tokens(n % 7, seed=90 + seed + n).tolist() for n in range(rows)]
        self.tokens = random_tokens(rows, nodes, seed=seed)
        self.parents = random_parents(rows, nodes, seed)
        self.logits = random_logits(rows, nodes + 1, VOCAB, seed=seed)
        self.tracker = ContextTracker(rows, EOS_IDS, CPU)
        for row in range(rows):
            self.tracker.enter(row, self.prompts[row])
            self.tracker.extend(row, self.outputs[row])

    def context(self, rows):
        return self.tracker.at(rows, self.tokens[rows], self.parents[rows])


@pytest.mark.parametrize("seed", range(3))
def test_every_law_at_every_node_equals_the_one_computed_by_hand(seed):
    batch = Batch(seed)
    rows = list(range(len(LAWS)))
    probs = process(batch.logits, SamplingRows.of(LAWS, CPU), batch.context(rows))
    for row, law in enumerate(LAWS):
        for place in range(NODES + 1):
            path = path_to(place, batch.tokens[row].tolist(), batch.parents[row].tolist())
            output = batch.outputs[row] + path
            wanted = plain_law(batch.logits[row, place], law, batch.prompts[row], output)
            torch.testing.assert_close(probs[row, place], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_of_a_mixed_batch_equal_the_same_rows_alone_to_the_bit(dtype):
    batch = Batch(seed=7)
    logits = batch.logits.to(dtype)
    rows = list(range(len(LAWS)))
    together = process(logits, SamplingRows.of(LAWS, CPU), batch.context(rows))
    for row, law in enumerate(LAWS):
        context = batch.context([row])
        alone = process(logits[row : row + 1], SamplingRows.of([law], CPU), context)
        assert torch.equal(together[row], alone[0])
        assert torch.equal(alone, process(logits[row : row + 1], law, context))


def test_the_order_of_rows_does_not_matter():
    batch = Batch(seed=3)
    rows = list(range(len(LAWS)))
    laws = SamplingRows.of(LAWS, CPU)
    straight = process(batch.logits, laws, batch.context(rows))
    back = rows[::-1]
    turned = process(batch.logits[back], laws.select(back), batch.context(back))
    assert torch.equal(turned, straight[back])


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_one_place_a_row_is_the_root_of_a_tree(law):
    batch = Batch(seed=5, nodes=0)
    rows = list(range(len(LAWS)))
    context = batch.tracker.at(rows)
    flat = process(batch.logits[:, 0], law, context)
    assert torch.equal(flat, process(batch.logits, law, context)[:, 0])


def test_greedy_rows_of_a_mixed_batch_are_exactly_one_hot():
    laws = SamplingRows.of([Sampling(1.0), Sampling(), Sampling(0.5, top_p=0.9)], CPU)
    logits = random_logits(3, 4, VOCAB, ties=True)
    probs = process(logits, laws)
    assert torch.equal(probs[1].sort(-1).values[:, -2:], torch.tensor([[0.0, 1.0]] * 4).double())
    assert torch.equal(probs[1].argmax(-1), greedy_ids(logits[1]))


def test_greedy_with_penalties_takes_the_largest_adjusted_logit():
    tracker = ContextTracker(1, [5], CPU)
    tracker.enter(0, [0])
    tracker.extend(0, [1, 1])
    logits = torch.tensor([[3.0, 2.9, 2.5, 0.0, 0.0, 9.0]])
    law = Sampling(repetition_penalty=1.1, frequency_penalty=0.1, min_new_tokens=3)
    adjusted = adjust(logits, law, tracker.at([0]))
    torch.testing.assert_close(
        adjusted, torch.tensor([[3 / 1.1, 2.9 / 1.1 - 0.2, 2.5, 0.0, 0.0, -torch.inf]])
    )
    assert process(logits, law, tracker.at([0])).argmax() == 0


@pytest.mark.parametrize("law", [Sampling(), Sampling(0.7, top_k=3)], ids=str)
def test_logits_that_nothing_adjusts_are_not_copied(law):
    logits = random_logits(2, 3, VOCAB)
    assert adjust(logits, law) is logits
    assert adjust(logits, SamplingRows.of([law, Sampling()], CPU)) is logits


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_logits_given_are_left_as_they_were(law):
    batch = Batch(seed=1)
    before = batch.logits.clone()
    process(batch.logits, law, batch.context(list(range(len(LAWS)))))
    assert torch.equal(batch.logits, before)


def test_end_tokens_are_banned_place_by_place():
    tracker = ContextTracker(1, EOS_IDS, CPU)
    tracker.enter(0, [9])
    tracker.extend(0, [1, 2])
    tokens = torch.tensor([[3, 4, 6]])
    context = tracker.at([0], tokens, torch.tensor([[-1, 0, 1]]))
    probs = process(random_logits(1, 4, VOCAB), Sampling(1.0, min_new_tokens=4), context)
    assert [bool((place[list(EOS_IDS)] == 0).all()) for place in probs[0]] == [
        True,  # 2 tokens are out
        True,
        False,  # the fifth may end
        False,
    ]


def test_without_end_tokens_there_is_nothing_to_ban():
    tracker = ContextTracker(1, (), CPU)
    tracker.enter(0, [9])
    logits = random_logits(1, VOCAB)
    law = Sampling(1.0, min_new_tokens=4)
    assert torch.equal(process(logits, law, tracker.at([0])), logits.softmax(-1))


def test_top_k_keeps_all_that_tie_and_more_than_there_are_keeps_all():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert process(logits, Sampling(1.0, top_k=2))[0].nonzero().flatten().tolist() == [1, 2, 3, 4]
    assert torch.equal(process(logits, Sampling(1.0, top_k=99)), logits.softmax(-1))


def test_top_p_takes_the_lowest_ids_among_ties():
    logits = torch.zeros(1, 4, dtype=torch.float64)
    assert process(logits, Sampling(1.0, top_p=0.5))[0].tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_of_a_large_vocabulary_does_not_depend_on_how_much_of_it_was_sorted(
    dtype, top_p, monkeypatch
):
    # one row is peaked and one flat: the flat one needs more than the likeliest few
    logits = torch.stack([4 * random_logits(2000, seed=1, ties=True), random_logits(2000, seed=2)])
    logits = logits.to(dtype)
    law = Sampling(1.0, top_p=top_p)
    short = process(logits, law)
    alone = [process(row, law) for row in logits]
    monkeypatch.setattr("draftlab.sampling.probabilities._LIKELIEST", 2000)
    whole = process(logits, law)
    assert torch.equal(short, whole)
    assert torch.equal(torch.stack(alone), whole)
    if dtype == torch.float64:
        for row, wanted in zip(logits, whole, strict=True):
            torch.testing.assert_close(plain_law(row, law, [], []), wanted, rtol=1e-11, atol=1e-15)


def test_a_law_that_reads_the_context_needs_one():
    with pytest.raises(ConfigError, match="no context was given"):
        process(random_logits(2, VOCAB), Sampling(1.0, presence_penalty=0.1))


def test_rows_that_do_not_fit_are_refused():
    batch = Batch(seed=0)
    with pytest.raises(ShapeMismatch, match="2 laws for logits of shape"):
        process(random_logits(3, VOCAB), SamplingRows.of([Sampling(), Sampling(1.0)], CPU))
    with pytest.raises(ShapeMismatch, match="does not fit logits"):
        process(random_logits(1, 3, VOCAB), Sampling(presence_penalty=1.0), batch.context([0]))


def test_laws_kept_from_inference_serve_logits_that_need_a_gradient():
    law = Sampling(0.37, top_k=5, logit_bias=((0, 0.5),))
    with torch.inference_mode():
        process(random_logits(2, VOCAB), law)
    logits = random_logits(2, VOCAB).requires_grad_()
    process(logits, law).max().backward()
    assert logits.grad is not None


def test_no_uniform_draws_an_id_without_mass():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(5, -1)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.99, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs, uniforms).tolist() == [1, 1, 3, 3, 3]


def test_what_is_left_of_p_is_p_itself_when_nothing_is():
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    q = torch.tensor([[0.5, 0.5], [0.6, 0.4]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.5, 0.5], [0.3, 0.0]]))
