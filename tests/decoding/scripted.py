"""Decode settings, and a drafter that proposes what a script says, to force any pattern of accepted tokens."""

from collections.abc import Callable
from dataclasses import replace

import torch
import yaml

from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.timing import DeviceClock
from draftlab.drafters.base import DraftBudget, Drafter, DrafterSettings, Observation
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.sampling import draw
from draftlab.settings.locate import conf_dir
from draftlab.targets.features import FeatureRequest


class ScriptedSettings(DrafterSettings):
    pass


class Scripted(Drafter, kind="scripted", settings=ScriptedSettings):
    """`script(prefix, depth)` gives the draft tokens after a prefix (the anchor included)."""

    def __init__(self, script: Callable[[list[int], int], list[int]], num_draft_tokens: int = 4):
        super().__init__()
        self.settings = ScriptedSettings(kind="scripted", num_draft_tokens=num_draft_tokens)
        self.script = script
        self.seen: list[Observation] = []

    @property
    def needs(self) -> FeatureRequest:
        return FeatureRequest()

    def forward(self, batch, features, noise):
        raise NotImplementedError

    def open(self, slots, capacity, kv):
        return [[] for _ in range(slots)]

    def observe(self, state, seen):
        self.seen.append(seen)
        for i, row in enumerate(seen.rows.tolist()):
            n = int(seen.lengths[i])
            if n:
                assert not state[row] or state[row][-1] == int(seen.ids[i, 0])
                state[row] = [
                    *state[row][:-1],
                    *seen.ids[i, :n].tolist(),
                    int(seen.next_ids[i, n - 1]),
                ]

    def propose(self, state, budget: DraftBudget, uniforms) -> DraftTree:
        drafts = [self.script(state[row], budget.num_draft_tokens) for row in budget.rows.tolist()]
        width = budget.num_draft_tokens
        tokens = torch.tensor([d[:width] + [0] * (width - len(d)) for d in drafts])
        return chain_of_points(tokens, torch.tensor([min(len(d), width) for d in drafts]))

    def close(self, state, rows):
        for row in rows.tolist():
            state[row] = []


def perfect(outputs: dict[tuple[int, ...], list[int]]):
    """Script that knows the greedy answer of every prompt."""

    def script(prefix, depth):
        for prompt, answer in outputs.items():
            n = len(prompt)
            if tuple(prefix[:n]) == prompt and prefix[n:] == answer[: len(prefix) - n]:
                return answer[len(prefix) - n :][:depth]
        return []

    return script


def wrong_from(script, right: int, vocab: int):
    """First `right` tokens as another script has them, then one that cannot be right."""

    def spoiled(prefix, depth):
        tokens = list(script(prefix, depth))
        return [t if i < right else (t + 1) % vocab for i, t in enumerate(tokens)]

    return spoiled


GREEDY_YAML = yaml.safe_load((conf_dir() / "decode" / "greedy.yaml").read_text())


def decode_settings(**changes):
    values = {**GREEDY_YAML, "max_new_tokens": 24, "batch_size": 3, "prefill_tokens": 16}
    values["ignore_eos"] = not changes.get("min_new_tokens")
    return DecodeSettings.model_validate({**values, **changes})


class ScriptedTree(Scripted, kind="scripted_tree", settings=ScriptedSettings):
    """`script(prefix, depth)` gives nodes as (token, parent, confidence)."""

    grows_trees = True

    def propose(self, state, budget: DraftBudget, uniforms) -> DraftTree:
        nodes = [self.script(state[row], budget.num_draft_tokens) for row in budget.rows.tolist()]
        width = max(len(row) for row in nodes)
        counts = torch.tensor([len(row) for row in nodes])
        padded = [row + [(0, -1, 0.0)] * (width - len(row)) for row in nodes]
        tokens, parents = (torch.tensor([[n[i] for n in row] for row in padded]) for i in (0, 1))
        points = chain_of_points(tokens.reshape(len(nodes), width), counts)
        sure = torch.tensor([[n[2] for n in row] for row in padded]).reshape(len(nodes), width)
        return replace(points, parents=parents.reshape(len(nodes), width), confidence=sure)


class Markov(Drafter, kind="markov", settings=ScriptedSettings):
    """Draws each token from a fixed law of the token before it; ids 0..n-1 only.

    `tells` turns (laws [R K n], drawn tokens [R K]) into the confidence: the honest one looks at
    the laws alone.
    """

    def __init__(self, laws, num_draft_tokens=3, tells=lambda laws, tokens: laws.amax(-1)):
        super().__init__()
        self.settings = ScriptedSettings(kind="markov", num_draft_tokens=num_draft_tokens)
        self.laws = laws
        self.tells = tells

    @property
    def needs(self) -> FeatureRequest:
        return FeatureRequest()

    def forward(self, batch, features, noise):
        raise NotImplementedError

    def open(self, slots, capacity, kv):
        return torch.zeros(slots, dtype=torch.int64)

    def observe(self, state, seen):
        last = (seen.lengths - 1).clamp_min(0).unsqueeze(1)
        newest = seen.next_ids.gather(1, last).squeeze(1)
        state[seen.rows] = torch.where(seen.lengths > 0, newest, state[seen.rows])

    def law_after(self, before, budget):
        return self.laws[before]

    def propose(self, state, budget: DraftBudget, uniforms) -> DraftTree:
        before, tokens, laws = state[budget.rows], [], []
        for k in range(budget.num_draft_tokens):
            laws.append(self.law_after(before, budget))
            before = draw(laws[-1], uniforms[:, k])
            tokens.append(before)
        chain, law = torch.stack(tokens, 1), torch.stack(laws, 1)
        rows, depth = chain.shape
        return DraftTree(
            chain,
            chain_parents(rows, depth, chain.device),
            torch.full((rows,), depth),
            law,
            torch.arange(law.shape[2]).expand(rows, depth, -1),
            self.tells(law, chain),
        )

    def close(self, state, rows):
        state[rows] = 0


class FakeClock(DeviceClock):
    """A clock that only `pass_time` moves."""

    def __init__(self):
        self.seconds = 0.0

    def read(self):
        return self.seconds

    def pass_time(self, seconds):
        self.seconds += seconds
