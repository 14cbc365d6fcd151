"""Random logits, trees and laws, and the law of one place computed as plainly as can be."""

from itertools import pairwise

import torch

from draftlab.sampling import Sampling

VOCAB = 23
EOS_IDS = (5, 11)

LAWS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.3, top_k=4),
    Sampling(1.0, top_p=0.8),
    Sampling(0.9, min_p=0.1),
    Sampling(1.1, top_k=9, top_p=0.9, min_p=0.02),
    Sampling(repetition_penalty=1.3),
    Sampling(1.0, repetition_penalty=0.8),
    Sampling(0.8, frequency_penalty=0.6),
    Sampling(0.8, presence_penalty=0.9),
    Sampling(logit_bias=((0, 2.5), (7, -3.0))),
    Sampling(1.0, logit_bias=((3, -torch.inf), (4, 1.0), (22, 0.5))),
    Sampling(1.0, min_new_tokens=6),
    Sampling(min_new_tokens=5, presence_penalty=0.4),
    Sampling(
        0.9,
        top_k=12,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.2,
        logit_bias=((2, 1.5), (5, 4.0)),
        min_new_tokens=6,
    ),
]


def random_logits(*shape: int, seed: int = 0, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (2 * logits).round() / 2 if ties else logits


def random_tokens(*shape: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def random_parents(rows: int, nodes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(-1, n, (rows,), generator=generator) for n in range(nodes)]
    return torch.stack(columns, 1) if columns else torch.zeros(rows, 0, dtype=torch.int64)


def path_to(place: int, tokens: list[int], parents: list[int]) -> list[int]:
    """Draft tokens from the root to a place (0 is the root), in order."""
    path, node = [], place - 1
    while node >= 0:
        path.append(tokens[node])
        assert parents[node] < node
        node = parents[node]
    return path[::-1]


def plain_logits(logits, law, prompt, output):
    """Bias, penalties and the ban on end tokens, one id at a time."""
    values = logits.tolist()
    for token, bias in law.logit_bias:
        values[token] += bias
    for token in {*prompt, *output}:
        r = law.repetition_penalty
        values[token] = values[token] / r if values[token] > 0 else values[token] * r
    for token in set(output):
        values[token] -= law.frequency_penalty * output.count(token) + law.presence_penalty
    if len(output) < law.min_new_tokens:
        for token in EOS_IDS:
            values[token] = -torch.inf
    return torch.tensor(values, dtype=torch.float64)


def plain_law(logits, law, prompt, output):
    """The whole law of one place, by sorting ids."""
    values = plain_logits(logits, law, prompt, output)
    if law.is_greedy:
        return torch.nn.functional.one_hot(values.argmax(), len(values)).double()
    values = values / law.temperature
    if law.top_k is not None:
        values[values < sorted(values.tolist())[-min(law.top_k, len(values))]] = -torch.inf
    probs = values.softmax(0)
    if law.top_p is not None:
        order = sorted(range(len(values)), key=lambda i: -probs[i])
        ends = torch.tensor([0.0, *probs[order].cumsum(0).tolist()])
        for i, (before, _) in zip(order, pairwise(ends.tolist()), strict=True):
            if before >= law.top_p:
                probs[i] = 0.0
        probs = probs / probs.sum()
    if law.min_p is not None:
        probs[probs < law.min_p * probs.max()] = 0.0
        probs = probs / probs.sum()
    return probs
