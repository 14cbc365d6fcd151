"""A draft model with another tokenizer: any causal language model drafts for any target.

In: target ids, told in the draft model's ids. Out: target ids, found in one of two ways (Timor et
al., arXiv:2502.05202). By tokens (TLI): the draft model draws from its law over the tokens that
both vocabularies have, which is the law q reported. By strings (SLEM): it writes a text greedily,
and the text is tokenised the target's way; a greedy text is a function of the prefix alone, so its
tokens are point masses whatever the target's sampling. Nothing is trained.

Read `Hetero.propose`, then _two_vocabularies.py.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._own_memory import CHUNK, OwnMemory, Text
from draftlab.drafters._two_vocabularies import Retelling, build_bridge
from draftlab.drafters.base import DraftBudget, Drafter, DrafterSettings, DraftLoss, Observation
from draftlab.drafters.layers import fuse
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.randomness import Noise
from draftlab.sampling import SamplingRows, draw, greedy_ids, process
from draftlab.settings.base import parse_settings
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.load import load_target
from draftlab.targets.settings import TargetSettings
from draftlab.targets.target import Target
from draftlab.targets.view import TargetView

log = logging.getLogger(__name__)

_ENOUGH_SHARED = 0.5


class HeteroSettings(DrafterSettings):
    """Keys of conf/drafter/hetero.yaml.

    Attributes:
        model: folder or hub name of the draft model.
        revision: of a hub model; None is its main one.
        method: tli drafts from the tokens both vocabularies have; slem has the drafted text
            tokenised the target's way; auto takes tli where half of the smaller vocabulary is
            shared.
    """

    model: str
    revision: str | None
    method: Literal["tli", "slem", "auto"]


@dataclass(slots=True)
class HeteroState:
    """Sequences as the target has them and as the draft model has them, by slot."""

    memory: OwnMemory
    told: list[Retelling]


class Hetero(Drafter, kind="hetero", settings=HeteroSettings):
    """A frozen causal language model of any tokenizer that drafts token by token.

    Attributes:
        method: tli or slem.
        bridge: between the two vocabularies.
    """

    def __init__(self, settings: HeteroSettings, target: TargetView) -> None:
        """Load the draft model in the target's dtype and compare the vocabularies.

        Raises:
            ConfigError: no such model, a tokenizer that cannot be read, or no token in common.
            UnsupportedTarget: a model whose cache cannot be rolled back exactly.
        """
        super().__init__()
        self.settings = settings
        self.target = target
        self._model = _load(settings, target)
        spec = self._model.spec
        names = f"target {target.spec.name}", f"draft model {spec.name}"
        self.bridge = build_bridge(target.tokenizer, self._model.tokenizer, names)
        shared = self.bridge.coverage
        enough = "tli" if shared >= _ENOUGH_SHARED else "slem"
        self.method = enough if settings.method == "auto" else settings.method
        if self.method == "tli" and not self.bridge.target_ids:
            raise ConfigError(
                f"{names[0]} and {names[1]} share no token; expected method=slem for this pair"
            )
        log.info("%s: %s, %.0f %% of tokens shared", names[1], self.method, 100 * shared)
        self._target_ids = torch.tensor(self.bridge.target_ids, device=target.device)
        self._draft_ids = torch.tensor(self.bridge.draft_ids, device=target.device)
        self._target_of = torch.zeros(spec.vocab_size, dtype=torch.int64, device=target.device)
        self._target_of[self._draft_ids] = self._target_ids

    @property
    def needs(self) -> FeatureRequest:
        """Ask for no hidden states."""
        return FeatureRequest()

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Refuse to train.

        Raises:
            ConfigError: always; the model stays as it is.
        """
        raise ConfigError(
            "drafter kind 'hetero' has nothing to train: the draft model stays as it is; use it as "
            "it is: draftlab eval drafter=hetero drafter.model=FOLDER_OR_NAME"
        )

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HeteroState:
        """Allocate the draft model's own keys and values, for as many of its tokens at first."""
        model = self._model
        is_fast = model.report["kernels"] == "fast"
        memory = OwnMemory(
            texts=[Text() for _ in range(slots)],
            kv=model.open_kv(slots, capacity + CHUNK),
            door=model.door,
            head=fuse(model.view.head_rows(None)) if is_fast else model.view.head,
            longest=model.spec.max_positions,
        )
        return HeteroState(memory, [Retelling(self.bridge) for _ in range(slots)])

    @torch.inference_mode()
    def observe(self, state: HeteroState, seen: Observation) -> None:
        """Tell the new tokens in draft ids; long prompts are run at once, as far as they are sure.

        Where the new telling departs from what was written, the rest is forgotten and run again.
        """
        rows, lengths = seen.rows.tolist(), seen.lengths.tolist()
        ids, next_ids = seen.ids.tolist(), seen.next_ids.tolist()
        for r, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length == 0:
                continue
            text, told = state.memory.texts[row], state.told[row]
            stable = told.stable
            told.extend([*([] if text.ids else ids[r][:1]), *next_ids[r][:length]])
            text.ids = told.ids
            text.settled = min(text.settled, stable)
            text.settle()
        self._make_room(state.memory, rows, CHUNK)
        state.memory.catch_up(rows)

    @torch.inference_mode()
    def propose(
        self, state: HeteroState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Draft K tokens one after another; rows past the model's own length draft nothing.

        By tokens, with `min_confidence`, every node tells the largest probability that the model
        gives any shared token at its place, known before one is drawn; drafting ends when no row
        is that sure.
        """
        depth, rows, memory = budget.num_draft_tokens, budget.rows.tolist(), state.memory
        able = [
            i for i, row in enumerate(rows) if memory.texts[row].has_room(depth, memory.longest)
        ]
        if not able:
            return self._nothing(len(rows), depth, budget.rows.device)
        slots = [rows[i] for i in able]
        self._make_room(memory, slots, depth + CHUNK)
        if self.method == "slem":
            return self._by_strings(state, budget, able)
        return self._by_tokens(state, budget, able, uniforms)

    def close(self, state: HeteroState, rows: Int[Tensor, " R"]) -> None:
        """Forget these rows; their keys and values are overwritten by the next sequence."""
        for row in rows.tolist():
            state.memory.texts[row] = Text()
            state.told[row] = Retelling(self.bridge)

    def _by_tokens(
        self, state: HeteroState, budget: DraftBudget, able: list[int], uniforms: Tensor
    ) -> DraftTree:
        """Draft from the draft model's law over the shared tokens."""
        rows, device = budget.rows.tolist(), budget.rows.device
        index = torch.tensor(able, device=device)
        # filters and biases speak of target ids, and here columns are shared tokens
        sampling = budget.sampling.drafting
        if isinstance(sampling, SamplingRows):
            sampling = sampling.select(able)
        laws: list[Tensor] = []
        sure: list[Tensor] = []

        def choose(hidden: Tensor, k: int) -> Tensor | None:
            logits = state.memory.head(hidden)[:, : self._model.spec.num_token_ids]
            shared = logits[:, self._draft_ids]
            if budget.min_confidence is not None:
                # what is not shared cannot be said, but the model would rather: it lowers this
                sure.append((shared.amax(-1) - logits.logsumexp(-1)).exp().float())
                goes_on = torch.stack(sure).amin(0) >= budget.min_confidence
                if k > 0 and not bool(goes_on.any()):
                    sure.pop()
                    return None
            if not budget.draws:
                return self._draft_ids[greedy_ids(shared)]
            laws.append(process(shared, sampling))
            return self._draft_ids[draw(laws[-1], uniforms[index, k])]

        found = state.memory.draft([rows[i] for i in able], budget.num_draft_tokens, choose)
        count, length = len(rows), found.shape[1]
        tokens = torch.zeros(count, length, dtype=torch.int64, device=device)
        tokens[index] = self._target_of[found]
        num_nodes = torch.zeros(count, dtype=torch.int64, device=device)
        num_nodes[index] = length
        confidence = None
        if sure:
            confidence = torch.zeros(count, length, device=device)
            confidence[index] = torch.stack(sure, dim=1)
        if not budget.draws:
            return replace(chain_of_points(tokens, num_nodes), confidence=confidence)
        law = torch.zeros(count, length, len(self._target_ids), dtype=laws[0].dtype, device=device)
        law[..., 0] = 1.0  # a law of some kind for rows that draft nothing
        law[index] = torch.stack(laws, dim=1)
        return DraftTree(
            tokens=tokens,
            parents=chain_parents(count, length, device),
            num_nodes=num_nodes,
            law_probs=law,
            law_ids=self._target_ids.expand(count, length, -1),
            confidence=confidence,
        )

    def _by_strings(self, state: HeteroState, budget: DraftBudget, able: list[int]) -> DraftTree:
        """Draft a text of K draft tokens greedily, and tokenise it the target's way."""
        rows, depth, device = budget.rows.tolist(), budget.num_draft_tokens, budget.rows.device
        slots = [rows[i] for i in able]

        def choose(hidden: Tensor, k: int) -> Tensor:
            return greedy_ids(state.memory.head(hidden)[:, : self._model.spec.num_token_ids])

        drafts: list[list[int]] = [[] for _ in rows]
        written = state.memory.draft(slots, depth, choose).tolist()
        for i, slot, draft in zip(able, slots, written, strict=True):
            drafts[i] = self.bridge.back(draft, state.told[slot].open)[:depth]
        padded = [draft + [0] * (depth - len(draft)) for draft in drafts]
        return chain_of_points(
            torch.tensor(padded, device=device),
            torch.tensor([len(draft) for draft in drafts], device=device),
        )

    def _nothing(self, rows: int, depth: int, device: torch.device) -> DraftTree:
        tokens = torch.zeros(rows, depth, dtype=torch.int64, device=device)
        return chain_of_points(tokens, torch.zeros(rows, dtype=torch.int64, device=device))

    def _make_room(self, memory: OwnMemory, slots: list[int], more: int) -> None:
        """Enlarge the buffers when a text takes more draft tokens than target tokens."""
        needed = max(len(memory.texts[slot].ids) for slot in slots) + more
        if needed <= memory.kv.capacity:
            return
        old = memory.kv
        memory.kv = self._model.open_kv(old.slots, max(needed, 2 * old.capacity))
        memory.kv.data[:, :, :, : old.capacity] = old.data


def _load(settings: HeteroSettings, target: TargetView) -> Target:
    """Load the draft model through the gate, as a target of its own."""
    if target.config.get("is_encoder_decoder"):
        raise UnsupportedTarget(
            f"target {target.spec.name} is an encoder-decoder model, and hetero drafts after a "
            "text alone; pass drafter=draft_model with a draft of the target's family"
        )
    is_folder = (Path(settings.model).expanduser() / "config.json").is_file()
    try:
        model = load_target(
            parse_settings(
                TargetSettings,
                {
                    "source": "local" if is_folder else "hub",
                    "name": settings.model,
                    "revision": settings.revision,
                    "family": "",
                    "seed": 0,
                    "dtype": str(target.dtype).removeprefix("torch."),
                    "device": str(target.device),
                    "kernels": "auto",
                    "remote_code": "refuse",
                    "cache_dir": "",
                },
            )
        )
    except ConfigError as error:
        raise ConfigError(f"drafter.model={settings.model}: {error}") from None
    if model.speculation_refusal is not None:
        raise UnsupportedTarget(
            f"draft model {model.spec.name} cannot draft: {model.speculation_refusal}; choose "
            "another model"
        )
    return model
