"""What tests of block drafters share: building one, and one block at a time by plain attention."""

import math
from pathlib import Path

import torch
import yaml
from eagle_kit import rotate_plainly

from draftlab.drafters.base import drafter_class
from draftlab.drafters.vocab import DraftVocab
from draftlab.settings.base import parse_settings

CONF = Path(__file__).parents[2] / "conf" / "drafter"
REDUCED = torch.tensor([i for i in range(261) if i % 3 or i == 256])
DECAY = {"position_weights": "decay", "step_decay": 0.8}
SMALL = {"block_size": 4, "num_draft_tokens": 3, "num_layers": 2, "max_anchors": None, **DECAY}
SHAPES = {
    "two-way": {},
    "causal": {"causal": True},
    "window": {"sliding_window": 5},
    "causal window": {"causal": True, "sliding_window": 5},
    "mask token": {"mask_token_id": 300},
}


def settings(kind, **changes):
    data = yaml.safe_load((CONF / f"{kind}.yaml").read_text()) | SMALL | changes
    return parse_settings(drafter_class(kind).settings_class, data)


def build(kind, target, vocab_ids=None, seed=0, **changes):
    """Build a small block drafter whose parameters are all away from their start."""
    vocab = None if vocab_ids is None else DraftVocab(vocab_ids, target.spec.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = drafter_class(kind)(settings(kind, **changes), target.view, vocab=vocab)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return drafter


def may_see(choices, num_context, slots):
    """True where slot j of a block after `num_context` positions may look, context first."""
    allowed = torch.zeros(slots, num_context + slots, dtype=torch.bool)
    for j in range(slots):
        for k in range(num_context + slots):
            is_near = choices.sliding_window is None or num_context + j - k < choices.sliding_window
            is_known = k < num_context or not choices.causal or k <= num_context + j
            allowed[j, k] = is_near and is_known
    return allowed


def reference_block(drafter, taps, anchor, slots):
    """Run one block after `taps` [n L D] alone; give its normed output [slots D]."""
    backbone = drafter.backbone
    sizes, view = backbone.sizes, drafter.target
    count = taps.shape[0]
    cos, sin = view.rope(torch.arange(count + slots))
    fused = backbone.hidden_norm(backbone.fc(taps.flatten(1)))
    masks = backbone.mask_embedding.expand(slots - 1, -1)
    hidden = torch.cat([view.embed(torch.tensor([anchor])), masks])
    allowed = may_see(backbone.choices, count, slots)
    for layer in backbone.layers:
        attention = layer.self_attn
        x = layer.input_layernorm(hidden)
        both = torch.cat([fused, x])
        q = attention.q_norm(attention.q_proj(x).view(slots, sizes.heads, -1)).transpose(0, 1)
        k = attention.k_proj(both).view(count + slots, sizes.kv_heads, -1)
        k = attention.k_norm(k).transpose(0, 1)
        v = attention.v_proj(both).view(count + slots, sizes.kv_heads, -1).transpose(0, 1)
        q, k = rotate_plainly(q, cos[count:], sin[count:]), rotate_plainly(k, cos, sin)
        groups = sizes.heads // sizes.kv_heads
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(sizes.head_dim)
        probs = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        hidden = hidden + attention.o_proj((probs @ v).transpose(0, 1).reshape(slots, -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return backbone.norm(hidden)


def anchors_of(ids, learned):
    """Positions of a sample where a block can begin: something before, something learned after."""
    return [a for a in range(1, len(ids) - 1) if a + 1 >= learned]


def support_of(drafter):
    """Target ids a drafter may propose."""
    if drafter.vocab is not None:
        return drafter.vocab.ids
    return torch.arange(drafter.target.spec.num_token_ids)
