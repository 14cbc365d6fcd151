"""A module of multi-token prediction rebuilt from an exported folder alone, as vLLM's MiMo class is."""

import torch
from replayed_parallel import ReplayedEagle

LAYER = "model.mtp_layers.0"


class ReplayedMTP(ReplayedEagle):
    """Continues the target's final state; what it continues with is its own normed output."""

    def __init__(self, folder):
        super().__init__(folder, None, None)
        for name in ("q_proj", "k_proj", "v_proj"):
            # a bias is one more column, read by a one
            matrix = f"{LAYER}.self_attn.{name}.weight"
            bias = self.weights.pop(f"{LAYER}.self_attn.{name}.bias")
            self.weights[matrix] = torch.cat([self.weights[matrix], bias.unsqueeze(1)], dim=1)

    def _attention(self, x, name):
        return super()._attention(torch.cat([x, torch.ones_like(x[:, :1])], dim=1), name)

    def draft(self, final, next_ids, tokens):
        hidden, ids, logits = final, next_ids, []
        for token in tokens:
            embedded = self.weights["model.embed_tokens.weight"][ids]
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
            parts = [
                self._norm(hidden, f"{LAYER}.hidden_layernorm"),
                self._norm(embedded, f"{LAYER}.token_layernorm"),
            ]
            residual = torch.cat(parts, dim=-1) @ self.weights[f"{LAYER}.input_proj.weight"].T
            x = self._norm(residual, f"{LAYER}.input_layernorm")
            residual = self._rest(residual + self._attention(x, LAYER), LAYER)
            normed = self._norm(residual[-1:], f"{LAYER}.final_layernorm")
            logits.append(normed[0] @ self.weights["lm_head.weight"].T)
            hidden = torch.cat([hidden, normed])
            ids = torch.cat([ids, token.view(1)])
        return torch.stack(logits)
