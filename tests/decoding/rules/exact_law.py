"""The exact output law of the shipped rules: every draft, every piece of every uniform.

A rule's output is piecewise constant in each uniform. For each draft the edges of the pieces follow
from the rule's definition in its paper (thresholds of acceptance, edges of a cumulative law). The
rule is run right beside every edge, on both sides: had it another edge, or another order, then one
of these runs would answer otherwise. Weighing the answers by the lengths of the pieces gives its
law.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from draftlab.drafters.tree import DraftTree
from draftlab.sampling import ContextTracker, process

BESIDE = 1e-9  # how far from an edge; float64 errors are a millionth of it
PROMPT = [0, 1]
EOS = 1

CHAINS = {f"chain of {depth}": tuple(range(-1, depth - 1)) for depth in (1, 2, 3)}
TREES = {
    "wide": (-1, -1, -1),
    "deep": (-1, -1, 0, 0, 1, 1),
    "uneven, branch after branch": (-1, 0, 0, -1, 3),
}
SHAPES = CHAINS | TREES


@dataclass(frozen=True)
class Draft:
    """How drafts come about.

    Attributes:
        parents: the tree's shape.
        drawn: siblings are drawn without replacement, in order; else the likeliest ones, in order.
        support: ids the drafter can say; None is all, in order of id, and no law_ids.
        lengths: ways to choose num_nodes, as numbers or functions of (toy, tokens, paths); the law
            must be right for each.
    """

    parents: tuple[int, ...]
    vocab: int
    drawn: bool = True
    support: tuple[int, ...] | None = None
    lengths: tuple = ()

    @property
    def depth(self):
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return max(depths)


def logits_after(seed, vocab, path):
    """Give a toy model's logits after a path: fixed, random, in float64."""
    code = sum((x + 1) * 11**i for i, x in enumerate(path))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + code)
    return torch.randn(vocab, generator=generator, dtype=torch.float64) * 1.5


class Toy:
    """A target and a drafter over a few ids, and how the target is sampled."""

    def __init__(self, draft, sampling, seed):
        self.draft, self.sampling, self.seed = draft, sampling, seed
        self._p, self._q = {}, {}

    def p(self, path):
        """Give the target's law after a path, computed for this place alone."""
        if path not in self._p:
            tracker = ContextTracker(1, [EOS], torch.device("cpu"))
            tracker.enter(0, PROMPT)
            tracker.extend(0, path)
            logits = logits_after(self.seed, self.draft.vocab, path).unsqueeze(0)
            self._p[path] = process(logits, self.sampling, tracker.at([0]))[0]
        return self._p[path]

    def q(self, path):
        if path not in self._q:
            logits = logits_after(self.seed + 1, self.draft.vocab, path)
            if self.draft.support is not None:
                outside = [x for x in range(self.draft.vocab) if x not in self.draft.support]
                logits[outside] = -torch.inf
            self._q[path] = logits.softmax(0)
        return self._q[path]

    def target_probs(self, tokens, paths):
        """Give p at every node of the trees, all at once, as the decoder does."""
        rows = len(paths)
        tracker = ContextTracker(rows, [EOS], torch.device("cpu"))
        for row in range(rows):
            tracker.enter(row, PROMPT)
        logits = torch.stack(
            [
                torch.stack([logits_after(self.seed, self.draft.vocab, path) for path in places])
                for places in paths
            ]
        )
        parents = torch.tensor(self.draft.parents).expand(rows, -1)
        return process(logits, self.sampling, tracker.at(list(range(rows)), tokens, parents))


def all_drafts(toy):
    """List every draft: its probability, tokens, laws, and the path to each place."""
    parents = toy.draft.parents

    def grow(tokens, laws, paths, mass):
        node = len(tokens)
        if node == len(parents):
            yield mass, tokens, laws, paths
            return
        path = paths[parents[node] + 1]
        law = toy.q(path).clone()
        law[[x for x, a in zip(tokens, parents, strict=False) if a == parents[node]]] = 0
        law = law / law.sum()
        if not toy.draft.drawn:
            law = torch.zeros_like(law).scatter(0, law.argmax(0, keepdim=True), 1.0)
        for x, chance in enumerate(law.tolist()):
            if chance:
                yield from grow([*tokens, x], [*laws, law], [*paths, (*path, x)], mass * chance)

    return list(grow([], [], [()], 1.0))


def normalised(weights):
    return weights / weights.sum() if weights.sum() > 0 else weights


def token_level_edges(toy, tokens, laws, paths, length):
    """Give each node's threshold, and the law drawn from when the walk ends at each place."""
    thresholds, ends = [0.0] * len(tokens), []
    for place, path in enumerate(paths):
        left = toy.p(path)
        for node in range(length):
            if toy.draft.parents[node] + 1 == place and left.sum() > 0:
                x = tokens[node]
                thresholds[node] = float(left[x] / laws[node][x])
                left = normalised((left - laws[node]).clamp_min(0))
        ends.append(left)
    return thresholds, ends


def block_edges(toy, tokens, laws, paths, length):
    weights = [1.0]
    for node in range(length):
        chance = toy.p(paths[node])[tokens[node]] / laws[node][tokens[node]]
        weights.append(min(1.0, weights[-1] * float(chance)))
    thresholds, ends = [0.0] * len(tokens), []
    for place, path in enumerate(paths):
        if place < length:
            left = (weights[place] * toy.p(path) - laws[place]).clamp_min(0)
            ends.append(normalised(left))
            total = float(left.sum())
            if place:
                rest = total + 1 - weights[place]
                thresholds[place - 1] = total / rest if rest else 1.0
        else:
            ends.append(toy.p(path))
    if length:
        thresholds[length - 1] = weights[length]
    return thresholds, ends


def pieces(threshold):
    """Give a point of each piece of an acceptance uniform, beside the edge, and its length."""
    if threshold <= 0:
        return [(BESIDE, 1.0)]
    if threshold >= 1:
        return [(1 - 2**-53, 1.0)]
    beside = min(BESIDE, threshold / 2, (1 - threshold) / 2)
    return [(threshold - beside, threshold), (threshold + beside, 1 - threshold)]


def output_laws(toy, rule, edges, judged=lambda tree: tree):
    """Compute the law of a round's output, {tokens: probability}, for each length of the draft.

    Args:
        toy: the models.
        rule: (tree, target_probs, accept_uniforms, next_uniforms) -> Verdict.
        edges: of the rule, from its definition.
        judged: what the rule is told of the tree; anything but the tree itself is a lie.
    """
    drafts = all_drafts(toy)
    lengths = toy.draft.lengths or (len(toy.draft.parents),)
    probs = toy.target_probs(torch.tensor([d[1] for d in drafts]), [d[3] for d in drafts])
    index, label, counts, uniforms, masses, ends = [], [], [], [], [], []
    for number, chosen in enumerate(lengths):
        for i, (mass, tokens, laws, paths) in enumerate(drafts):
            length = chosen(toy, tokens, paths) if callable(chosen) else chosen
            thresholds, laws_at_end = edges(toy, tokens, laws, paths, length)
            ends.append(torch.stack(laws_at_end))
            for choice in itertools.product(*map(pieces, thresholds)):
                index.append((i, number * len(drafts) + i))
                label.append(number)
                counts.append(length)
                uniforms.append([u for u, _ in choice])
                weight = mass
                for _, piece in choice:
                    weight *= piece
                masses.append(weight)
    draft_of, end_of = torch.tensor(index).unbind(1)
    label, uniforms = torch.tensor(label), torch.tensor(uniforms, dtype=torch.float64)
    masses, ends = torch.tensor(masses, dtype=torch.float64), torch.stack(ends)
    tree = judged(whole_tree(toy.draft, drafts, draft_of, torch.tensor(counts)))
    half = torch.full(label.shape, 0.5, dtype=torch.float64)
    first = rule(tree, probs[draft_of], uniforms, half)
    last = first.path.gather(1, (first.num_accepted - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
    place = torch.where(first.num_accepted > 0, last + 1, 0)
    law = ends[end_of, place]
    row, following, piece = next_pieces(law)
    verdict = rule(take_rows(tree, row), probs[draft_of[row]], uniforms[row], following)
    # a rule whose acceptance reads the next token's uniform would have another path here
    assert torch.equal(verdict.path, first.path[row])
    return emitted(toy, tree.tokens[row], verdict, masses[row] * piece, label[row], len(lengths))


def next_pieces(law):
    """Give rows, uniforms beside both ends of each token's piece, and half of its length."""
    upper = law.cumsum(1)
    lower = upper - law
    beside = torch.full_like(law, BESIDE).minimum(law / 2)
    row, token = (law > 0).nonzero(as_tuple=True)
    points = torch.cat([(lower + beside)[row, token], (upper - beside)[row, token]])
    return torch.cat([row, row]), points, torch.cat([law[row, token]] * 2) / 2


def whole_tree(draft, drafts, draft_of, num_nodes):
    tokens = torch.tensor([d[1] for d in drafts])[draft_of]
    laws = torch.stack([torch.stack(d[2]) for d in drafts])[draft_of]
    ids = None
    if not draft.drawn:
        ids, laws = tokens.unsqueeze(2), torch.ones_like(laws[:, :, :1])
    elif draft.support is not None:
        laws = laws[:, :, list(draft.support)]
        ids = torch.tensor(draft.support).expand_as(laws)
    parents = torch.tensor(draft.parents).expand_as(tokens)
    return DraftTree(tokens, parents, num_nodes, laws, ids)


def take_rows(tree, row):
    ids = None if tree.law_ids is None else tree.law_ids[row]
    return replace(
        tree,
        tokens=tree.tokens[row],
        parents=tree.parents[row],
        num_nodes=tree.num_nodes[row],
        law_probs=tree.law_probs[row],
        law_ids=ids,
    )


def emitted(toy, tokens, verdict, masses, label, count):
    """Sum up masses by what came out."""
    base, depth = toy.draft.vocab + 1, toy.draft.depth
    path = verdict.path[:, :depth]
    on_path = path >= 0
    digits = torch.where(on_path, tokens.gather(1, path.clamp_min(0)) + 1, 0)
    digits = torch.cat([digits, torch.zeros_like(digits[:, :1])], 1)
    digits = digits.scatter(1, on_path.sum(1, keepdim=True), verdict.next_token.unsqueeze(1) + 1)
    assert torch.equal(on_path.sum(1), verdict.num_accepted)
    code = (digits * base ** torch.arange(depth + 1)).sum(1)
    sums = torch.zeros(count, base ** (depth + 1), dtype=torch.float64)
    sums.index_put_((label, code), masses, accumulate=True)
    laws = []
    for line in sums:
        law = {}
        for number in line.nonzero().flatten().tolist():
            tokens_out = [number // base**i % base - 1 for i in range(depth + 1)]
            law[tuple(x for x in tokens_out if x >= 0)] = float(line[number])
        laws.append(law)
    return laws


def distance_from_target(toy, law):
    """Give the total variation of whole sequences: a round, then the target alone."""
    length = toy.draft.depth + 1
    joint = defaultdict(float)

    def extend(path, mass):
        if len(path) == length:
            joint[path] += mass
            return
        for x, chance in enumerate(toy.p(path).tolist()):
            if chance:
                extend((*path, x), mass * chance)

    extend((), -1.0)
    for tokens, mass in law.items():
        extend(tokens, mass)
    return sum(map(abs, joint.values())) / 2
