"""More networks rebuilt from an exported folder alone: EAGLE, and those that draft in one pass."""

import torch
from replayed_head import ReplayedEagle3


class ReplayedEagle(ReplayedEagle3):
    """Continues the target's final state; what it continues with is its own output, as it is."""

    def __init__(self, folder, embed, head):
        super().__init__(folder, embed)
        self.head = head

    def draft(self, final, next_ids, tokens):
        hidden, ids, logits = final, next_ids, []
        for token in tokens:
            joined = torch.cat([self.embed(ids), hidden], dim=-1)
            residual = joined @ self.weights["fc.weight"].T
            for i in range(self.config["num_hidden_layers"]):
                name = f"layers.{i}"
                x = self._norm(residual, f"{name}.input_layernorm") if i else residual
                residual = self._rest(residual + self._attention(x, name), name)
            logits.append(residual[-1] @ self.head.T)
            hidden = torch.cat([hidden, residual[-1:]])
            ids = torch.cat([ids, token.view(1)])
        return torch.stack(logits)

    def _rest(self, residual, name):
        x = self._norm(residual, f"{name}.post_attention_layernorm")
        gate = torch.nn.functional.silu(x @ self.weights[f"{name}.mlp.gate_proj.weight"].T)
        up = x @ self.weights[f"{name}.mlp.up_proj.weight"].T
        return residual + (gate * up) @ self.weights[f"{name}.mlp.down_proj.weight"].T


class ReplayedPEagle(ReplayedEagle3):
    """True rows, then rows of which neither token nor taps are known."""

    def draft(self, taps, next_ids, tokens):
        unknown = len(tokens) - 1
        width = self.config["target_hidden_size"]
        masks = self.weights["mask_hidden"].view(1, -1, width).expand(unknown, -1, -1)
        ids = torch.cat([next_ids, torch.full((unknown,), self.config["mask_token_id"])])
        out = self._layers(self.embed(ids), self._fuse(torch.cat([taps, masks])))
        return self._norm(out[-len(tokens) :], "norm") @ self.weights["lm_head.weight"].T


class ReplayedDFlash(ReplayedEagle):
    """One block after the anchor: keys and values of the context come from its features."""

    def __init__(self, folder, embed, head):
        super().__init__(folder, embed, head)
        self.special = self.config["dflash_config"]
        self.mask_id = self.special.get("mask_token_id", self.config.get("mask_token_id"))
        if "embed_tokens.weight" in self.weights:
            self.embed = lambda ids: self.weights["embed_tokens.weight"][ids]

    def draft(self, taps, next_ids, tokens):
        depth = len(tokens)
        slots = depth + 1 if self.special["causal"] else self.config["block_size"]
        head = self.weights.get("lm_head.weight", self.head)
        return self._fill(taps, next_ids[-1], slots)[1 : depth + 1] @ head.T

    def _fill(self, taps, anchor, slots):
        config, causal = self.config, self.special["causal"]
        joined = taps.flatten(1) @ self.weights["fc.weight"].T
        context = self._norm(joined, "hidden_norm")
        length = context.shape[0]
        ids = torch.full((slots,), self.mask_id)
        ids[0] = anchor
        residual = self.embed(ids)
        places = torch.arange(length + slots)
        asks = places[length:].unsqueeze(1)
        hidden_from = places > (asks if causal else places[-1])
        if self.special["use_swa"]:
            hidden_from = hidden_from | (places <= asks - self.special["swa_window_size"])
        for i in range(config["num_hidden_layers"]):
            name = f"layers.{i}"
            x = self._norm(residual, f"{name}.input_layernorm")
            mixed = self._block_attention(context, x, name, hidden_from)
            residual = self._rest(residual + mixed, name)
        return self._norm(residual, "norm")

    def _block_attention(self, context, x, name, hidden_from):
        config = self.config
        width, heads, kv = (
            config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads")
        )
        both = torch.cat([context, x])

        def project(part, rows, count):
            weight = self.weights[f"{name}.self_attn.{part}_proj.weight"]
            return (rows @ weight.T).view(-1, count, width).transpose(0, 1)

        queries = self._norm(project("q", x, heads), f"{name}.self_attn.q_norm")
        keys = self._turn(self._norm(project("k", both, kv), f"{name}.self_attn.k_norm"))
        padding = torch.zeros(heads, context.shape[0], width)
        queries = self._turn(torch.cat([padding, queries], dim=1))[:, context.shape[0] :]
        keys, values = (
            t.repeat_interleave(heads // kv, dim=0) for t in (keys, project("v", both, kv))
        )
        scores = (queries @ keys.transpose(1, 2) / width**0.5).masked_fill(hidden_from, -torch.inf)
        out = (scores.softmax(-1) @ values).transpose(0, 1).reshape(x.shape[0], heads * width)
        return out @ self.weights[f"{name}.self_attn.o_proj.weight"].T


class ReplayedDSpark(ReplayedDFlash):
    """The same block, every slot of which drafts, knowing the token before."""

    def draft(self, taps, next_ids, tokens):
        hidden = self._hidden(taps, next_ids[-1], len(tokens))
        logits = hidden @ self.weights.get("lm_head.weight", self.head).T
        return logits + self._before(next_ids, tokens) @ self._markov("markov_w2").T

    def confidence(self, taps, next_ids, tokens):
        hidden = self._hidden(taps, next_ids[-1], len(tokens))
        read = torch.cat([hidden, self._before(next_ids, tokens)], dim=-1)
        weight, bias = (self.weights[f"confidence_head.proj.{x}"] for x in ("weight", "bias"))
        return (read @ weight.T + bias).sigmoid()[:, 0]

    def _hidden(self, taps, anchor, depth):
        slots = depth if self.special["causal"] else self.config["block_size"]
        return self._fill(taps, anchor, slots)[:depth]

    def _before(self, next_ids, tokens):
        return self._markov("markov_w1")[torch.cat([next_ids[-1:], tokens[:-1]])]

    def _markov(self, part):
        return self.weights[f"markov_head.{part}.weight"]
