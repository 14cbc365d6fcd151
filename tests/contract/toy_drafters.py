"""Two drafters of shapes the shipped ones do not have; the contract must hold for them as well."""

from dataclasses import dataclass

import torch
from torch import nn

from draftlab.drafters.base import Drafter, DrafterSettings, DraftLoss
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError
from draftlab.sampling import draw, greedy_ids, process
from draftlab.targets.features import FeatureRequest
from draftlab.targets.step import Step

TOYS = ("toy_block", "toy_self")


@dataclass
class SelfState:
    kv: object
    base: list
    anchor: list


class ToySelf(Drafter, kind="toy_self", settings=DrafterSettings):
    """Self-speculation: the target's own first layers draft, on the target's own KV."""

    def __init__(self, settings, target):
        super().__init__()
        self.settings, self.target = settings, target

    @property
    def needs(self):
        return FeatureRequest()

    def forward(self, batch, features, noise):
        raise ConfigError("toy_self has nothing to train")

    def open(self, slots, capacity, kv):
        return SelfState(kv, [0] * slots, [-1] * slots)

    def observe(self, state, seen):
        for r, row in enumerate(seen.rows.tolist()):
            if (length := int(seen.lengths[r])) > 0:
                state.base[row] += length
                state.anchor[row] = int(seen.next_ids[r, length - 1])

    def propose(self, state, budget, uniforms):
        depth, rows = budget.num_draft_tokens, budget.rows.tolist()
        base = torch.tensor([state.base[row] for row in rows])
        ids = torch.tensor([max(0, state.anchor[row]) for row in rows])
        tokens, laws = [], []
        for k in range(depth):
            step = Step(budget.rows, ids.unsqueeze(1), base + k, live=int(base.max()) + k + 1)
            hidden = self.target.run_layers(state.kv, step, (0, 1))
            logits = self.target.head(self.target.final_norm(hidden[:, 0]))
            logits[:, self.target.spec.num_token_ids :] = -torch.inf
            laws.append(process(logits, budget.sampling))
            ids = greedy_ids(logits) if not budget.draws else draw(laws[-1], uniforms[:, k])
            tokens.append(ids)
        nodes = torch.tensor([depth if state.anchor[row] >= 0 else 0 for row in rows])
        parents = chain_parents(len(rows), depth, ids.device)
        return DraftTree(torch.stack(tokens, 1), parents, nodes, torch.stack(laws, 1), None)

    def close(self, state, rows):
        for row in rows.tolist():
            state.base[row], state.anchor[row] = 0, -1


@dataclass
class BlockState:
    hidden: torch.Tensor
    is_seen: torch.Tensor


class ToyBlock(Drafter, kind="toy_block", settings=DrafterSettings):
    """One pass for the whole block: one matrix turns h_t into K hidden states."""

    def __init__(self, settings, target):
        super().__init__()
        self.settings, self.target = settings, target
        width = target.spec.hidden_size
        self.fan_out = nn.Linear(width, settings.num_draft_tokens * width, bias=False)
        with torch.no_grad():
            self.fan_out.weight.copy_(torch.eye(width).repeat(settings.num_draft_tokens, 1))

    @property
    def needs(self):
        return FeatureRequest(wants_final=True)

    def _logits(self, hidden):
        wide = self.fan_out(hidden).unflatten(-1, (self.settings.num_draft_tokens, -1))
        logits = self.target.head(wide)
        known = torch.arange(logits.shape[-1]) < self.target.spec.num_token_ids
        return logits.masked_fill(~known, -torch.inf)

    def forward(self, batch, features, noise):
        depth = self.settings.num_draft_tokens
        log_q = self._logits(features.final).log_softmax(-1)
        sums, total = torch.zeros(4, depth, dtype=log_q.dtype), torch.zeros((), dtype=log_q.dtype)
        for k in range(depth):
            for sample in torch.unique(batch.sample_ids[batch.sample_ids >= 0]).tolist():
                b, t = (batch.shifted_mask(2 + k) & (batch.sample_ids == sample)).nonzero(
                    as_tuple=True
                )
                if b.numel() == 0:
                    continue
                ids = batch.shifted_ids(2 + k)[b, t]
                q = log_q[b, t, k]
                loss = -q.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
                p = self.target.head(features.final[b, t + 1 + k]).softmax(-1)
                total = total + loss.mean()
                sums[0, k] += loss.sum().detach()
                sums[1, k] += (p.argmax(-1) == q.argmax(-1)).sum()
                sums[2, k] += torch.minimum(p, q.exp()).sum().detach()
                sums[3, k] += loss.numel()
        return DraftLoss(total, *sums)

    def open(self, slots, capacity, kv):
        width = self.target.spec.hidden_size
        return BlockState(
            torch.zeros(slots, width, dtype=self.target.dtype), torch.zeros(slots, dtype=torch.bool)
        )

    def observe(self, state, seen):
        for r, row in enumerate(seen.rows.tolist()):
            if (length := int(seen.lengths[r])) > 0:
                state.hidden[row] = seen.final[r, length - 1]
                state.is_seen[row] = True

    def propose(self, state, budget, uniforms):
        depth, rows = budget.num_draft_tokens, budget.rows
        logits = self._logits(state.hidden[rows])[:, :depth]
        nodes = torch.where(state.is_seen[rows], depth, 0)
        if not budget.draws:
            return chain_of_points(greedy_ids(logits), nodes)
        probs = process(logits, budget.sampling)
        parents = chain_parents(rows.shape[0], depth, rows.device)
        return DraftTree(draw(probs, uniforms), parents, nodes, probs, None)

    def close(self, state, rows):
        state.is_seen[rows] = False
