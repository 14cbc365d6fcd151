import pytest
import torch

from draftlab.drafters.layers import LayerSizes, RMSNorm, SwiGLU, fuse, rope_of, rotate, signed_sin
from draftlab.targets.tiny import tiny_target

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def test_the_norm_scales_to_unit_root_mean_square_in_float32_or_wider():
    x = torch.randn(3, 8)
    norm = RMSNorm(8, 1e-6)
    assert torch.allclose(norm(x).pow(2).mean(-1), torch.ones(3), atol=1e-4)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0))
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * torch.arange(8.0)
    assert torch.allclose(norm(x), expected, atol=1e-6)
    assert norm(x.bfloat16()).dtype == torch.float32
    assert norm.double()(x.double()).dtype == torch.float64


def test_the_mlp_is_gated_by_silu():
    mlp = SwiGLU(4, 6)
    x = torch.randn(2, 4)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    assert torch.allclose(mlp(x), (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.T, atol=1e-6)


def test_rotation_turns_halves_and_leaves_what_is_past_the_rotary_width():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = torch.rand(2, 5, 6, dtype=torch.float64), torch.rand(2, 5, 6, dtype=torch.float64)
    got = rotate(x, cos, signed_sin(sin))
    first, second, rest = x.split([3, 3, 2], -1)
    turned = torch.cat([-second, first], -1)
    expected = torch.cat([first, second], -1) * cos[:, :, None] + turned * sin[:, :, None]
    assert torch.allclose(got[..., :6], expected)
    assert got[..., 6:].equal(rest)


def test_rotation_keeps_the_dtype_of_what_it_turns():
    cos = torch.ones(1, 2, 4)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert rotate(torch.ones(1, 2, 1, 4, dtype=dtype), cos, cos).dtype == dtype


@pytest.mark.parametrize("rope", [PLAIN, LINEAR, LLAMA3, YARN], ids=lambda r: r["rope_type"])
def test_a_drafter_turns_as_its_target_does_with_its_scaling(rope):
    """Case O-16."""
    target = tiny_target(rope_parameters=rope, max_position_embeddings=256)
    positions = torch.tensor([0, 63, 64, 255])
    cos, sin = rope_of(target.view, 16)(positions)
    expected = target.model.model.rotary_emb(torch.zeros(1), positions[None])
    assert torch.allclose(cos, expected[0][0].float())
    assert torch.allclose(sin, expected[1][0].float())
    if rope is not PLAIN:
        plain = tiny_target(max_position_embeddings=256).view.rope(positions)
        assert not torch.allclose(cos, plain[0])


def test_a_target_without_rotary_positions_gets_plain_ones():
    cos, sin = rope_of(tiny_target("gpt2").view, 16)(torch.tensor([0, 1, 7]))
    expected = tiny_target().view.rope(torch.tensor([0, 1, 7]))
    assert torch.allclose(cos, expected[0], atol=1e-6)
    assert torch.allclose(sin, expected[1], atol=1e-6)


def test_sizes_are_the_targets_own_in_every_family():
    llama = LayerSizes.of(tiny_target().view.config)
    assert (llama.hidden, llama.intermediate, llama.heads, llama.kv_heads, llama.head_dim) == (
        64,
        128,
        4,
        2,
        16,
    )
    gpt2 = LayerSizes.of(tiny_target("gpt2").view.config)
    assert (gpt2.intermediate, gpt2.kv_heads, gpt2.head_dim) == (256, 4, 16)
    assert LayerSizes.of(tiny_target().view.config, 96).intermediate == 96


def test_fused_projections_give_what_the_single_ones_give():
    one, two = torch.randn(4, 8), torch.randn(2, 8)
    x = torch.randn(3, 8)
    assert torch.allclose(fuse(one, two)(x), torch.cat([x @ one.T, x @ two.T], -1), atol=1e-6)
