import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftlab.data.answers import AnswerFeatures, AnswerRecord, ShardStore
from draftlab.data.feature_bytes import bytes_of_vector, lay_out_vectors, take_vectors


def vectors(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def through_a_file(tmp_path, given, dtype):
    save_file(lay_out_vectors("taps", given, dtype), tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        found = take_vectors("taps", 0, len(given), file)
        assert take_vectors("final", 0, 1, file) is None
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["target", "bf16"])
def test_what_the_format_holds_comes_back_bit_for_bit(tmp_path, dtype):
    given = vectors(5, 2, 32).bfloat16()
    assert torch.equal(through_a_file(tmp_path, given, dtype), given)


def test_eight_bits_lose_what_three_mantissa_bits_lose(tmp_path):
    given = vectors(400, 3, 64) * torch.tensor([1e-3, 1.0, 3e4]).view(1, 3, 1)
    found = through_a_file(tmp_path, given, "fp8")
    error = (found - given).abs()
    largest = given.abs().amax(-1, keepdim=True)
    assert (error <= given.abs() / 16 + largest * 2.0**-18).all()
    # rounding to 4 significant bits: 0.0266 of the length in the mean, whatever the vector's scale
    lost = error.square().mean((0, 2)).sqrt() / given.square().mean((0, 2)).sqrt()
    assert ((lost > 0.024) & (lost < 0.029)).all()


def test_one_huge_value_does_not_drown_the_small_ones(tmp_path):
    given = vectors(50, 64)
    given[:, 7] = 3000.0
    found = through_a_file(tmp_path, given, "fp8")
    rest = torch.arange(64) != 7
    lost = (found - given)[:, rest].norm() / given[:, rest].norm()
    assert lost < 0.04
    # eight bits of equal steps would lose nearly all of it
    steps = 3000.0 / 127
    even = (given / steps).round() * steps
    assert (even - given)[:, rest].norm() / given[:, rest].norm() > 0.9


def test_zeros_stay_zeros(tmp_path):
    assert not through_a_file(tmp_path, torch.zeros(3, 16), "fp8").any()


@pytest.mark.parametrize("dtype", ["target", "bf16", "fp8"])
def test_the_bytes_of_a_vector_are_those_on_disk(dtype):
    laid = lay_out_vectors("final", vectors(7, 96), dtype)
    on_disk = sum(part.numel() * part.element_size() for part in laid.values())
    assert on_disk == 7 * bytes_of_vector(96, dtype, 4)


def test_eight_bits_take_at_most_55_percent_of_bfloat16(tmp_path):
    record = AnswerRecord("a", "chat", (), tuple(range(200)), tuple(range(57)), "eos", 0)
    captured = AnswerFeatures(vectors(256, 3, 576), vectors(256, 576, seed=1))
    sizes = {}
    for dtype in ("bf16", "fp8"):
        store = ShardStore(tmp_path / dtype)
        store.write(0, [record], [captured], features_dtype=dtype)
        assert store.list_shards() == [0]
        sizes[dtype] = (tmp_path / dtype / "shard-00000.safetensors").stat().st_size
        taps, final = store.read()[0].load_features()
        assert taps is not None
        assert taps.shape == (257, 3, 576)
        assert final is not None
        torch.testing.assert_close(final[:256].float(), captured.final, rtol=1 / 15, atol=1e-4)
    assert sizes["fp8"] <= 0.55 * sizes["bf16"]
