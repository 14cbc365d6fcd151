"""Slow references of drafters that fill several places in one pass: blocks, and P-EAGLE's depths."""

import math

import torch
from eagle_kit import features_of, reference_pass, rotate_plainly

SHAPES = {
    "two-way": {},
    "causal": {"causal": True},
    "window": {"sliding_window": 5},
    "causal window": {"causal": True, "sliding_window": 5},
    "mask token": {"mask_token_id": 300},
}


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


def parallel_states(drafter, taps, tokens, depths):
    """What P-EAGLE's LM head reads at every depth after the true rows of `taps` [n L D].

    Args:
        tokens: of the positions and one more, the anchor.
    """
    embed = drafter.target.embed
    unknown = embed(torch.tensor([drafter.mask_token_id])).expand(depths - 1, -1)
    learned = drafter.fuse_taps(drafter.mask_hidden.view(-1, 64)).expand(depths - 1, -1)
    embedded = torch.cat([embed(torch.tensor(tokens[1:])), unknown])
    out = reference_pass(drafter, embedded, torch.cat([drafter.fuse_taps(taps), learned]))
    return drafter.norm(out[len(tokens) - 2 :])


def expected_laws(drafter, target, text, depth, temperature=1.0):
    """Target ids, and laws of the tokens after a text whose last token is the anchor."""
    taps = features_of(target, drafter, text[:-1]).taps[0]
    if drafter.kind == "peagle":
        states = parallel_states(drafter, taps, text, depth)
    else:
        states = reference_block(drafter, taps, text[-1], drafter.settings.block_size)[1:]
    ids = support_of(drafter)
    logits = states[:depth] @ drafter._head.rows[: len(ids)].T
    return ids, (logits / temperature).softmax(-1)
