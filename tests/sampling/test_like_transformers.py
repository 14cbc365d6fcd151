"""Every processor equals transformers' own, in double precision, ties included."""

import pytest
import torch
from sampling_kit import EOS_IDS, VOCAB, path_to, random_logits, random_parents, random_tokens
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftlab.sampling import ContextTracker, Sampling, process

CPU = torch.device("cpu")
PROMPT = random_tokens(9, seed=1).tolist()
OUTPUT = random_tokens(4, seed=2).tolist()
NODES = 7

CASES = [
    (Sampling(0.7), [TemperatureLogitsWarper(0.7)]),
    (Sampling(1.0, top_k=5), [TopKLogitsWarper(5)]),
    (Sampling(1.0, top_k=VOCAB + 4), [TopKLogitsWarper(VOCAB + 4)]),
    (Sampling(1.0, min_p=0.15), [MinPLogitsWarper(0.15)]),
    (Sampling(1.0, min_p=1.0), [MinPLogitsWarper(1.0)]),
    (Sampling(1.0, repetition_penalty=1.4), [RepetitionPenaltyLogitsProcessor(1.4)]),
    (Sampling(1.0, repetition_penalty=0.7), [RepetitionPenaltyLogitsProcessor(0.7)]),
    (
        Sampling(1.0, min_new_tokens=6),
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, list(EOS_IDS))],
    ),
    (
        Sampling(1.0, logit_bias=((3, -2.0), (8, 5.5))),
        [SequenceBiasLogitsProcessor([[[3], -2.0], [[8], 5.5]])],
    ),
]
TOP_P_CASES = [
    (Sampling(1.0, top_p=0.85), [TopPLogitsWarper(0.85)]),
    (Sampling(1.0, top_p=0.01), [TopPLogitsWarper(0.01)]),
    (
        Sampling(
            0.8,
            top_k=11,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.2,
            logit_bias=((0, 1.5), (5, 3.0), (6, -4.0)),
            min_new_tokens=6,
        ),
        [
            SequenceBiasLogitsProcessor([[[0], 1.5], [[5], 3.0], [[6], -4.0]]),
            RepetitionPenaltyLogitsProcessor(1.2),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, list(EOS_IDS)),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(11),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ],
    ),
]


def compare(law, theirs, *, ties, seed):
    tokens, parents = random_tokens(1, NODES, seed=seed), random_parents(1, NODES, seed)
    tracker = ContextTracker(1, EOS_IDS, CPU)
    tracker.enter(0, PROMPT)
    tracker.extend(0, OUTPUT)
    logits = random_logits(1, NODES + 1, VOCAB, seed=seed, ties=ties)
    probs = process(logits, law, tracker.at([0], tokens, parents))
    for place in range(NODES + 1):
        path = path_to(place, tokens[0].tolist(), parents[0].tolist())
        ids = torch.tensor([PROMPT + OUTPUT + path])
        scores = logits[:, place].clone()
        for processor in theirs:
            scores = processor(ids, scores)
        torch.testing.assert_close(
            probs[:, place], scores.softmax(-1), rtol=1e-12, atol=1e-15, msg=f"place {place}"
        )


@pytest.mark.parametrize(("law", "theirs"), CASES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_processor_equals_transformers_own_at_every_node(law, theirs, ties, seed):
    compare(law, theirs, ties=ties, seed=seed)


@pytest.mark.parametrize(("law", "theirs"), TOP_P_CASES)
@pytest.mark.parametrize("seed", range(4))
def test_with_top_p_they_are_equal_where_nothing_ties(law, theirs, seed):
    compare(law, theirs, ties=False, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_among_ties_top_p_keeps_as_many_of_the_same_logits(seed):
    # which ids of a tie stay is a choice of the sort: ours are the lowest, theirs undefined
    logits = random_logits(5, VOCAB, seed=seed, ties=True)
    ours = process(logits, Sampling(1.0, top_p=0.8)) > 0
    theirs = TopPLogitsWarper(0.8)(torch.zeros(5, 0, dtype=torch.int64), logits) > -torch.inf
    for row in range(5):
        assert logits[row, ours[row]].sort().values.tolist() == (
            logits[row, theirs[row]].sort().values.tolist()
        )
