"""Losses against running the decode-time pass at every place of every sample, token by token."""

import pytest
import torch
from block_kit import anchors_of, parallel_states, reference_block
from building import REDUCED, build
from eagle_kit import (
    features_of,
    make_batch,
    random_tokens,
    reference_states,
    sample_loss,
    samples,
)

from draftlab.randomness import Noise

EAGLE = {"feature_weight": 2.0}
PEAGLE = {"depth_keep": 1.0, "step_decay": 0.7}
STIR = {"dflash": 0.1, "medusa": 0.05, "hydra": 0.05}  # which would start as their target's head
CASES = {
    "eagle": ("eagle", EAGLE),
    "eagle of two layers": ("eagle", {"num_layers": 2, "fc_bias": True, **EAGLE}),
    "EAGLE-1": ("eagle", {"hass_steps": 1, **EAGLE}),
    "eagle3": ("eagle3", {}),
    "eagle3 of two layers": ("eagle3", {"num_layers": 2}),
    "EAGLE-3.0": ("eagle3", {"fc_norm": False, "norm_output": False, "train_head": True}),
    "eagle3, residual after the norm": (
        "eagle3",
        {"norm_before_residual": True, "fc_norm": False, "norm_before_fc": True},
    ),
    "eagle3, one step": ("eagle3", {"unroll_steps": 1}),
    "peagle": ("peagle", PEAGLE),
    "peagle of one layer": ("peagle", {"num_layers": 1, **PEAGLE}),
    "peagle without norms": ("peagle", {"fc_norm": False, **PEAGLE}),
    "peagle, residual after the norm": (
        "peagle",
        {"norm_before_residual": True, "mask_token_id": 300, **PEAGLE},
    ),
    "dflash": ("dflash", {"objective": "cross_entropy"}),
    "dflash, soft": ("dflash", {"objective": "forward_kl"}),
    "medusa, own heads": ("medusa", {"head": "own"}),
    "medusa, tied": ("medusa", {}),
    "hydra, own heads": ("hydra", {"head": "own"}),
    "hydra, tied": ("hydra", {}),
}


def predicted(drafter, features, sample, num_depths):
    """(depth, place of the token predicted, what the LM head reads) by running what decoding runs."""
    ids, learned = sample
    if drafter.kind == "dflash":
        for a in anchors_of(ids, learned):
            block = reference_block(drafter, features.taps[0, :a], ids[a], num_depths + 1)
            yield from ((k, a + 1 + k, block[k + 1]) for k in range(num_depths))
        return
    for t in range(len(ids) - 2):
        if drafter.kind in ("medusa", "hydra"):
            states = head_states(drafter, features.final[0, t], ids[t + 1 : t + 1 + num_depths])
        elif drafter.kind == "peagle":
            taps = features.taps[0, : t + 1]
            states = parallel_states(drafter, taps, ids[: t + 2], num_depths)
        else:
            states = reference_states(drafter, features, ids, t, min(num_depths, len(ids) - 2 - t))
        yield from ((k, t + 2 + k, state) for k, state in enumerate(states))


def head_states(drafter, joined, tokens):
    """What head after head makes of a state; Hydra's see the tokens up to their own as well."""
    for k, token in enumerate(tokens):
        if drafter.kind == "medusa":
            yield drafter.blocks[k](joined)
        else:
            joined = torch.cat([joined, drafter.target.embed(torch.tensor(token))])
            yield drafter.heads[k](joined)


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_its_gradients_are_those_of_the_decode_time_pass_everywhere(
    target, case, vocab_ids
):
    """What EAGLE feeds back is detached here too; letting it flow gives other gradients."""
    kind, changes = CASES[case]
    drafter = build(kind, target, vocab_ids, stir=STIR.get(kind, 0.0), **changes)
    chosen = [*samples(), (random_tokens(18, 4), 3)]
    batch = make_batch(chosen, 18)
    got = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    parts = []
    for sample in chosen:
        features = features_of(target, drafter, sample[0])
        found = predicted(drafter, features, sample, len(got.count))
        parts.append(sample_loss(drafter, features, sample, found, len(got.count)))
    total = sum(part[0] for part in parts)
    assert got.total.item() == pytest.approx(total.item(), rel=1e-9)
    assert (got.count >= 3).all()
    sums = torch.stack([got.loss_sum, got.hit_sum, got.overlap_sum, got.count])
    assert torch.allclose(sums, sum(part[1] for part in parts))
    got.total.backward()
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    total.backward()
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(grads[name], parameter.grad, atol=1e-9), name
