"""Decode settings, and a drafter that proposes what a script says, to force any pattern of accepted tokens."""

from collections.abc import Callable

import torch

from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.base import DraftBudget, Drafter, DrafterSettings, Observation
from draftlab.drafters.tree import DraftTree, chain_of_points
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


def decode_settings(**changes):
    values = {
        "rule": "auto",
        "num_draft_tokens": None,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "max_new_tokens": 24,
        "batch_size": 3,
        "prefill_tokens": 16,
        "ignore_eos": True,
        "seed": 0,
    }
    return DecodeSettings(**{**values, **changes})
