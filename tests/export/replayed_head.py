"""Networks rebuilt from an exported folder alone, in plain torch: what an engine would compute.

Written from the formats' description, not from the drafters: nothing of draftlab is imported.
"""

import json

import torch
from safetensors.torch import load_file


def read_folder(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


class ReplayedEagle3:
    """Chain drafting over true features, then over its own output. No cache: all rows again."""

    def __init__(self, folder, embed):
        self.config, self.weights = read_folder(folder)
        self.embed = embed

    def draft(self, taps, next_ids, tokens):
        """Logits of every step, the drafted tokens given.

        taps [T, L, H] of the known positions, next_ids [T] the token after each, tokens [K].
        """
        hidden = self._fuse(taps)
        ids = next_ids
        logits = []
        for token in tokens:
            residual = self._layers(self.embed(ids), hidden)[-1]
            normed = self._norm(residual, "norm")
            logits.append(normed @ self.weights["lm_head.weight"].T)
            fed = normed if self.config["norm_output"] else residual
            hidden = torch.cat([hidden, fed.unsqueeze(0)])
            ids = torch.cat([ids, token.view(1)])
        return torch.stack(logits)

    def target_ids(self):
        columns = torch.arange(self.config["draft_vocab_size"])
        return columns + self.weights["d2t"] if "d2t" in self.weights else columns

    def _fuse(self, taps):
        if self.config["fc_norm"]:
            parts = [self._norm(taps[:, i], f"fc_norm.{i}") for i in range(taps.shape[1])]
            joined = torch.cat(parts, dim=-1)
        else:
            joined = taps.flatten(1)
        if self.config["norm_before_fc"]:
            joined = self._norm(joined, "input_norm")
        return joined @ self.weights["fc.weight"].T

    def _layers(self, embedded, hidden):
        residual = hidden
        for i in range(self.config["num_hidden_layers"]):
            name = "midlayer" if i == 0 else f"layers.{i}"
            if i == 0:
                normed = self._norm(hidden, "midlayer.hidden_norm")
                residual = normed if self.config["norm_before_residual"] else hidden
                x = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed], dim=-1)
            else:
                x = self._norm(residual, f"{name}.input_layernorm")
            residual = residual + self._attention(x, name)
            x = self._norm(residual, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(x @ self.weights[f"{name}.mlp.gate_proj.weight"].T)
            up = x @ self.weights[f"{name}.mlp.up_proj.weight"].T
            residual = residual + (gate * up) @ self.weights[f"{name}.mlp.down_proj.weight"].T
        return residual

    def _attention(self, x, name):
        config = self.config
        width, heads, kv = (
            config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads")
        )
        rows = x.shape[0]

        def project(part, count):
            weight = self.weights[f"{name}.self_attn.{part}_proj.weight"]
            return (x @ weight.T).view(rows, count, width).transpose(0, 1)

        q, k = self._turn(project("q", heads)), self._turn(project("k", kv))
        k, v = (t.repeat_interleave(heads // kv, dim=0) for t in (k, project("v", kv)))
        scores = q @ k.transpose(1, 2) / width**0.5
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        if "layer_types" in config:
            hidden |= torch.ones_like(hidden).tril(-config["sliding_window"])
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        out = mixed.transpose(0, 1).reshape(rows, heads * width)
        return out @ self.weights[f"{name}.self_attn.o_proj.weight"].T

    def _turn(self, x):
        rope = self.config["rope_parameters"]
        assert rope["rope_type"] == "default"
        assert rope["rope_theta"] == self.config["rope_theta"]
        half = x.shape[-1] // 2
        frequencies = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _norm(self, x, name):
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return (
            x * (mean_square + self.config["rms_norm_eps"]).rsqrt() * self.weights[f"{name}.weight"]
        )


def replay_medusa(folder, final):
    """Logits [heads, V] for one final hidden state; ids outside a reduced vocabulary get -inf."""
    config, weights = read_folder(folder)
    logits = []
    for i in range(config["num_heads"]):
        x = final
        for j in range(config["num_hidden_layers"]):
            y = x @ weights[f"blocks.{i}.layers.{j}.weight"].T
            if config["medusa_fc_bias"]:
                y = y + weights[f"blocks.{i}.layers.{j}.bias"]
            x = x + torch.nn.functional.silu(y)
        shared = config.get("original_lm_head", False)
        spoken = x @ weights["lm_head.weight" if shared else f"lm_heads.{i}.weight"].T
        if "truncated_vocab_size" in config:
            full = torch.full((config["vocab_size"],), -torch.inf, dtype=spoken.dtype)
            full[weights["token_map"]] = spoken
            spoken = full
        logits.append(spoken)
    return torch.stack(logits)
