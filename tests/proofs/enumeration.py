"""The exact law of whole answers of the shipped engine: every draw of every round.

All numbers the engine draws come from `uniforms(seed, row, round, slot, purpose)`. Here a table
stands in its place, and each row of one large batch is one way the draws can fall: one point in
each piece on which nothing changes. Pieces follow from the rules' papers and from the target's law
computed without any cache; a row weighs the product of its pieces' lengths. Summing the weights by
what the engine put out is its law, as far as float64 carries, with caches, positions, masks,
penalties, cuts and rules all in it.

Read Enumeration.rows, then engine_law.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from exact_law import BESIDE, block_edges, pieces, token_level_edges

import draftlab.decoding.batch as batch_room
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.randomness import Purpose, uniforms
from draftlab.targets.step import Step
from proofs.five_words import PROMPT

SEED = 11


@dataclass(frozen=True)
class Draft:
    """One way the drafter's draws can fall.

    Attributes:
        mass: its probability.
        draws: a uniform a node.
        tree: what the drafter then proposes, R = 1.
    """

    mass: float
    draws: tuple
    tree: object


@dataclass
class Enumeration:
    """Lists every way the draws of an answer can fall.

    Attributes:
        words: the target's law.
        drafter: asked for its drafts after a fresh prefill, so that what it keeps between rounds
            has to amount to the same.
        judge: "token", "block" or "points", whose edges are known.
        depth: K.
        shape: a `StaticTree`, or None for chains.
        least: drafts end before a node of less confidence; None cuts nothing.
    """

    words: object
    drafter: object
    judge: str
    depth: int
    shape: object = None
    least: float | None = None
    _drafts: dict = field(default_factory=dict)

    def rows(self, answer=(), turn=0, draws=(), mass=1.0):
        """Yield (draws, probability): what each numbered draw is, as ((turn, purpose, slot), u)."""
        if self.words.is_over(answer):
            yield draws, mass
            return
        room = 0 if turn == 0 else self.words.length - len(answer) - 1
        for draft in self.drafts(answer) if room else [None]:
            nodes = 0 if draft is None else self._num_nodes(draft.tree, room)
            if draft is not None:
                given = [((turn, Purpose.DRAFT, n), u) for n, u in enumerate(draft.draws)]
            else:
                draft, given = SimpleNamespace(mass=1.0, tree=None), []
            for accepts, weight, path, law in self._verdicts(answer, draft.tree, nodes):
                run = tuple(int(draft.tree.tokens[0, n]) for n in path)
                some = [((turn, Purpose.ACCEPT, n), u) for n, u in accepts]
                for word, u, piece in middles(law):
                    last = [((turn, Purpose.RESAMPLE, 0), u)]
                    yield from self.rows(
                        self._keep(answer, (*run, word)),
                        turn + 1,
                        (*draws, *given, *some, *last),
                        mass * draft.mass * weight * piece,
                    )

    def drafts(self, answer):
        """List every draft after an answer; a draw's pieces follow from the law drawn from."""
        if answer not in self._drafts:
            propose = after_prefill(self.words.target, self.drafter, [*PROMPT, *answer], self)
            self._drafts[answer] = list(self._grow(propose, (), 1.0))
        return self._drafts[answer]

    def _grow(self, propose, draws, mass):
        tree = propose(draws)
        drawn = getattr(self.drafter, "drawn", tree.law_probs)
        node = len(draws)
        if node == tree.tokens.shape[1]:
            yield Draft(mass, draws, tree)
            return
        is_own = drawn is tree.law_probs and tree.law_ids is not None
        for column, u, piece in middles(drawn[0, node]):
            token = int(tree.law_ids[0, node, column]) if is_own else column
            # a law that is not the one drawn from has its edges elsewhere
            for beside in (u - piece / 2 + BESIDE, u + piece / 2 - BESIDE):
                found = int(propose((*draws, beside)).tokens[0, node])
                assert found == token or piece < 2 * BESIDE, "drawn from another law than is told"
            yield from self._grow(propose, (*draws, u), mass * piece)

    def _num_nodes(self, tree, room):
        nodes = int(tree.num_nodes[0])
        if self.shape is None:
            nodes = min(nodes, room)
        if self.least is not None:
            sure = (tree.confidence[0] >= self.least).tolist()
            nodes = min(nodes, (*sure, False).index(False))
        return nodes

    def _verdicts(self, answer, tree, nodes):
        """Yield (accept draws, probability, accepted path, law of the next token)."""
        if nodes == 0:
            yield [], 1.0, (), self.words.p(answer)
            return
        parents = tree.parents[0].tolist()
        tokens = tree.tokens[0].tolist()
        laws = told_laws(tree)
        paths = [()]
        for node, parent in enumerate(parents):
            paths.append((*paths[parent + 1], tokens[node]))
        toy = SimpleNamespace(
            p=lambda path: self.words.p((*answer, *path)), draft=SimpleNamespace(parents=parents)
        )
        edges = block_edges if self.judge == "block" else token_level_edges
        thresholds, ends = edges(toy, tokens, laws, paths, nodes)
        for choice in itertools.product(*map(pieces, thresholds[:nodes])):
            passes = [u < t for (u, _), t in zip(choice, thresholds, strict=False)]
            path = self._accepted(passes, parents)
            weight = 1.0
            for _, piece in choice:
                weight *= piece
            law = ends[path[-1] + 1 if path else 0]
            if law.sum() > 0:  # else a rejection that cannot happen
                yield [(n, u) for n, (u, _) in enumerate(choice)], weight, path, law

    def _accepted(self, passes, parents):
        if self.judge == "block":
            longest = max((n + 1 for n, passed in enumerate(passes) if passed), default=0)
            return tuple(range(longest))
        path, at = [], -1
        for node, passed in enumerate(passes):
            if passed and parents[node] == at:
                path.append(node)
                at = node
        return tuple(path)

    def _keep(self, answer, run):
        for token in run:
            if self.words.is_over(answer):
                break
            answer = (*answer, token)
        return answer


def middles(law):
    """Give (id, middle of its piece, probability) of every id that a law can draw."""
    law = law / law.sum()
    ends = law.cumsum(0)
    return [(i, float(ends[i] - law[i] / 2), float(law[i])) for i in range(len(law)) if law[i] > 0]


def told_laws(tree):
    """Spread the laws of a tree's nodes over the five words."""
    laws = []
    for node in range(tree.tokens.shape[1]):
        law = tree.law_probs[0, node].double()
        if tree.law_ids is not None:
            law = torch.zeros(5, dtype=torch.float64).scatter(0, tree.law_ids[0, node], law)
        laws.append(law)
    return laws


def after_prefill(target, drafter, text, plan):
    """Show a drafter a whole text at once; give a function from its draws to its proposal."""
    kv = target.open_kv(1, 32)
    ids = torch.tensor([text[:-1]])
    rows, length = torch.tensor([0]), torch.tensor([ids.shape[1]])
    step = Step(rows, ids, torch.tensor([0]), live=ids.shape[1])
    with torch.inference_mode():
        state = drafter.open(1, 32, kv)
        seen = target.run(kv, step, request=drafter.needs, wants_logits=False).features
        drafter.observe(
            state, Observation(rows, ids, length, torch.tensor([text[1:]]), seen.taps, seen.final)
        )
    count = plan.depth if plan.shape is None else len(getattr(plan.shape, "parents", ()))
    sampling = plan.words.sampling
    budget = DraftBudget(
        rows,
        plan.depth,
        type(sampling)(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
        points=plan.judge == "points",
        tree=plan.shape,
        min_confidence=plan.least,
    )

    def propose(draws):
        numbers = torch.full((1, count), 0.5, dtype=torch.float64)
        numbers[0, : len(draws)] = torch.tensor(draws, dtype=torch.float64)
        with torch.inference_mode():
            return drafter.propose(state, budget, numbers)

    return propose


def use_table(monkeypatch, rows):
    """Let the engine draw from these rows' tables; what no row names is some number or other."""
    turns = 1 + max(turn for draws, _ in rows for (turn, _, _), _ in draws)
    width = 1 + max(slot for draws, _ in rows for (_, _, slot), _ in draws)
    table = uniforms(
        99,
        torch.arange(len(rows)).view(-1, 1, 1, 1),
        torch.arange(turns).view(-1, 1, 1),
        torch.arange(8).view(-1, 1),
        torch.arange(width),
    )
    where = [(r, *place) for r, (draws, _) in enumerate(rows) for place, _ in draws]
    values = torch.tensor([u for draws, _ in rows for _, u in draws], dtype=torch.float64)
    r, turn, purpose, slot = torch.tensor(where).unbind(1)
    table[r, turn, purpose, slot] = values

    def from_table(seed, *keys):
        assert seed == SEED
        if len(keys) == 3:  # by place in the answer
            row, place, purpose = keys
            return table[row, place.clamp_max(turns - 1), int(purpose), 0]
        row, turn, slot, purpose = keys
        return table[row, turn.clamp_max(turns - 1), purpose, slot.clamp_max(width - 1)]

    monkeypatch.setattr(batch_room, "uniforms", from_table)


def engine_law(monkeypatch, decoder, rows, length):
    """Run the engine once for every row; give {answer: probability}."""
    use_table(monkeypatch, rows)
    answers = decoder.generate([list(PROMPT)] * len(rows), max_new_tokens=length)
    law = defaultdict(float)
    for answer, (_, mass) in zip(answers, rows, strict=True):
        law[answer.output_ids] += mass
    return law, answers


def distance(law, wanted):
    """Give the total variation between two laws."""
    return sum(abs(law.get(x, 0.0) - wanted.get(x, 0.0)) for x in {*law, *wanted}) / 2
