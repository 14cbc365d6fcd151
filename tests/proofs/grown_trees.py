"""Trees whose shape follows from the prefix, and every way the draws of an answer with them can fall.

Which nodes a budget keeps, and where a chain of chosen length ends, is told a second time here, in
plain Python for one row; nothing of it is shared with what ships.
"""

from dataclasses import dataclass, replace

import torch
from exact_law import pieces, token_level_edges
from scripted import ScriptedSettings, decode_settings

from draftlab.drafters._growth import grow
from proofs.drafters import FiveWords
from proofs.enumeration import SEED, Draft, Enumeration, after_prefill, told_laws
from proofs.five_words import PROMPT

FROM_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_new_tokens",
)


class Grower(FiveWords, kind="five_words_grower", settings=ScriptedSettings):
    """Has its trees grown by the code that grows those of the house."""

    def propose(self, state, budget, uniforms):
        if budget.tree is None:
            return super().propose(state, budget, uniforms)
        texts = [[tuple(state[row])] for row in budget.rows.tolist()]

        def expand(columns, parents):
            nonlocal texts
            lines = zip(texts, columns.tolist(), parents.tolist(), strict=True)
            texts = [
                [(*above[p], word) for word, p in zip(words, places, strict=True)]
                for above, words, places in lines
            ]
            return torch.stack([torch.stack([self.q(t).log() for t in row]) for row in texts])

        return grow(
            budget,
            torch.stack([self.q(row[0]).log() for row in texts]),
            expand,
            uniforms,
            law=budget.sampling,
            ids=None,
            is_live=torch.ones(len(texts), dtype=torch.bool),
        )


class CutByDraws(Grower, kind="five_words_cut_by_draws", settings=ScriptedSettings):
    """Broken: a node counts only if the very token drawn there was a likely one."""

    def propose(self, state, budget, uniforms):
        tree = super().propose(state, budget, uniforms)
        own = tree.law_probs.gather(2, tree.tokens.unsqueeze(2)).squeeze(2)
        return replace(tree, num_nodes=(own >= 0.5).long().cumprod(1).sum(1))


@dataclass
class GrownTrees(Enumeration):
    """Lists the draws of answers whose drafts are functions of the prefix, nothing in them drawn.

    Only nodes that the walk comes to have pieces of their own; what the others draw is some number
    or other, which may change nothing.

    Attributes:
        seconds: what a pass over 1, 2, ... tokens costs; None verifies all nodes.
    """

    seconds: tuple | None = None

    def drafts(self, answer):
        if answer not in self._drafts:
            text = [*PROMPT, *answer]
            tree = after_prefill(self.words.target, self.drafter, text, self)(())
            if self.seconds is not None:
                tree = spend(tree, self.seconds)
            self._drafts[answer] = [Draft(1.0, (), tree)]
        return self._drafts[answer]

    def _verdicts(self, answer, tree, nodes):
        if nodes == 0:
            yield [], 1.0, (), self.words.p(answer)
            return
        parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
        paths = [()]
        for node, parent in enumerate(parents):
            paths.append((*paths[parent + 1], tokens[node]))
        toy = Toy(lambda path: self.words.p((*answer, *path)), parents)
        thresholds, ends = token_level_edges(toy, tokens, told_laws(tree), paths, nodes)
        for draws, weight, path in walks(parents[:nodes], thresholds):
            law = ends[path[-1] + 1 if path else 0]
            if law.sum() > 0:  # else a rejection that cannot happen
                yield draws, weight, path, law


class Toy:
    """What `token_level_edges` asks of a model."""

    def __init__(self, p, parents):
        self.p, self.draft = p, self
        self.parents = parents


def walks(parents, thresholds, path=(), tried=-1, draws=(), weight=1.0):
    """Yield (accept draws, probability, accepted path) of every walk down a tree."""
    at = path[-1] if path else -1
    children = [n for n, parent in enumerate(parents) if parent == at and n > tried]
    if not children:
        yield list(draws), weight, path
        return
    node = children[0]
    for u, piece in pieces(thresholds[node]):
        onward = (*path, node) if u < thresholds[node] else path
        drawn = (*draws, (node, u))
        yield from walks(parents, thresholds, onward, node, drawn, weight * piece)


def spend(tree, seconds):
    """Keep of a row's tree what promises most tokens a second: the surest paths, so many of them."""
    paths = []
    for sure, parent in zip(tree.confidence[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append(sure * (paths[parent] if parent >= 0 else 1.0))
    order = sorted(range(len(paths)), key=lambda node: -paths[node])
    rates = [
        (1 + sum(paths[node] for node in order[:size])) / seconds[size]
        for size in range(len(order) + 1)
    ]
    kept = sorted(order[: rates.index(max(rates))])
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    above = [place[int(tree.parents[0, node])] for node in kept]
    return replace(
        tree,
        tokens=tree.tokens[:, kept],
        parents=torch.tensor([above], dtype=torch.int64),
        num_nodes=torch.tensor([len(kept)]),
        law_probs=tree.law_probs[:, kept],
        law_ids=None if tree.law_ids is None else tree.law_ids[:, kept],
        confidence=tree.confidence[:, kept],
    )


@dataclass
class ChosenLengths(Enumeration):
    """Lists the draws of answers whose chains are as long as pays.

    Attributes:
        seconds: what a pass over 1, 2, ... tokens costs.
        looks_ahead: a length that pays less than the one before does not end the search.
    """

    seconds: tuple = ()
    looks_ahead: bool = False

    def _num_nodes(self, tree, room):
        best, best_rate, tokens, path = 0, 1 / self.seconds[0], 1.0, 1.0
        sure = tree.confidence[0].tolist()
        for size in range(1, super()._num_nodes(tree, room) + 1):
            path *= sure[size - 1]
            tokens += path
            if tokens / self.seconds[size] > best_rate:
                best, best_rate = size, tokens / self.seconds[size]
            elif not self.looks_ahead:
                break
        return best


def settings_for(sampling, **changes):
    """Give settings of a sampled run over any number of rows."""
    law = {name: getattr(sampling, name) for name in FROM_SAMPLING}
    fixed = {"ignore_eos": False, "seed": SEED, "batch_size": 20_000, "prefill_tokens": 100_000}
    bias = dict(sampling.logit_bias) or None
    return decode_settings(**{**law, **fixed, "logit_bias": bias, **changes})
