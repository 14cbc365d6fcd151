"""Forecasts of memory, disk and time: held against hand-made sums and against real passes."""

import pytest
import torch

from draftlab.cli.accelerators import find_accelerator
from draftlab.cli.disk_forecast import forecast_disk
from draftlab.cli.drafter_size import find_drafter_size
from draftlab.cli.estimate import estimate_run
from draftlab.cli.launch import compose_run
from draftlab.cli.memory_forecast import forecast_memory
from draftlab.cli.passes import passes_of_body, passes_of_head
from draftlab.cli.schema import parse_drafter
from draftlab.cli.time_forecast import BANDWIDTH_SHARE, FLOPS_SHARE, forecast_time
from draftlab.data.packing import Sample, collate, pack
from draftlab.drafters.base import num_trainable
from draftlab.drafters.store import build_drafter
from draftlab.randomness import Noise
from draftlab.settings.compose import compose
from draftlab.targets.outline import find_outline
from draftlab.targets.tiny import tiny_target

LLAMA = ["recipe=eagle3/llama3.1-8b-instruct"]


def settings_of(*words):
    return compose_run(words)[0]


def drafter_of(kind, *words):
    return parse_drafter(compose("train", [f"drafter={kind}", *words]).data["drafter"])


def forecasts(*words):
    settings = settings_of(*words)
    estimate = estimate_run(settings)
    return settings, estimate, forecast_memory(settings, estimate)


@pytest.mark.parametrize(
    "kind", ["eagle", "eagle3", "medusa", "hydra", "mtp", "peagle", "dflash", "dspark"]
)
def test_a_drafters_size_is_that_of_the_real_one(kind):
    target = tiny_target(dtype=torch.float32)
    outline = find_outline(settings_of("target=tiny").target, asks_hub=False)
    choice = drafter_of(kind)
    real = build_drafter(choice, target.view)
    size = find_drafter_size(choice, outline, settings_of().target, asks_hub=False)
    assert size.num_parameters == sum(p.numel() for p in real.parameters())
    assert size.num_trainable == num_trainable(real)
    assert size.needs == real.needs


@pytest.mark.parametrize("trainable", ["all", "layers"])
def test_a_draft_model_of_the_targets_layers_has_their_size(trainable):
    target = tiny_target(dtype=torch.float32)
    outline = find_outline(settings_of("target=tiny").target, asks_hub=False)
    choice = drafter_of("draft_model", f"drafter.trainable={trainable}", "drafter.layers=[0,3]")
    real = build_drafter(choice, target.view)
    size = find_drafter_size(choice, outline, settings_of().target, asks_hub=False)
    assert size.num_parameters == sum(p.numel() for p in real.parameters())
    assert size.num_trainable == num_trainable(real)


def test_a_head_has_a_row_for_every_draft_token():
    choice = drafter_of("medusa", "drafter.head=own", "drafter.draft_vocab_size=100")
    whole = drafter_of("medusa", "drafter.head=own")
    outline = find_outline(settings_of("target=tiny").target, asks_hub=False)
    target = settings_of().target
    sizes = [find_drafter_size(c, outline, target, asks_hub=False) for c in (choice, whole)]
    assert sizes[1].num_trainable - sizes[0].num_trainable == 4 * (320 - 100) * 64


def kept_bytes(drafter, batch, features, owners):
    """Bytes that a training pass keeps for its backward pass, weights and features aside."""
    theirs = {p.untyped_storage().data_ptr() for owner in owners for p in owner.parameters()}
    given = [x for x in (features.taps, features.final) if x is not None]
    theirs |= {x.untyped_storage().data_ptr() for x in given}
    kept, alive = {}, []

    def note(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in theirs:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        drafter(batch, features, Noise(0))
    return sum(kept.values())


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "peagle", "dflash", "draft_model"])
def test_activations_are_within_a_third_of_a_real_pass(kind):
    """A vocabulary of 320 keeps the loss small beside the network."""
    target = tiny_target(
        dtype=torch.float32,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        head_dim=64,
    )
    choice = drafter_of(kind)
    drafter = build_drafter(choice, target.view).train()
    ids = torch.arange(256) % 250
    sample = Sample(sample_id=0, domain="d", ids=ids, mask=torch.arange(256) >= 16)
    batch = collate(pack([sample], 256))
    features = target.read_features(batch, drafter.needs)
    measured = kept_bytes(drafter, batch, features, [drafter, target.model])
    linears = [m for m in drafter.modules() if isinstance(m, torch.nn.Linear)]
    sides = sum(m.in_features + m.out_features for m in linears if m.out_features != 320)
    assert 0.75 < measured / (256 * passes_of_body(choice, 256) * sides * 5.0) < 1.35


def test_passes_follow_the_keys_of_the_settings():
    assert passes_of_body(drafter_of("eagle3"), 512) == 4
    assert passes_of_body(drafter_of("dflash"), 512) == 256 * 8 / 512
    assert passes_of_body(drafter_of("dflash"), 64) == 8
    assert passes_of_body(drafter_of("draft_model"), 512) == 1
    medusa = drafter_of("medusa")
    assert (passes_of_body(medusa, 512), passes_of_head(medusa, 512)) == (1, 4)


def test_states_follow_optimizer_and_sharding():
    _, estimate, stages = forecasts(*LLAMA)
    trained = estimate.drafter.num_trainable
    assert stages["training"]["optimizer state"] == 8 * trained
    muon = forecasts(*LLAMA, "optim=muon")[2]["training"]
    assert muon["optimizer state"] == 8 * trained - 4 * estimate.drafter.num_matrices
    words = ["hardware=fsdp", "hardware.num_processes=4"]
    cut = forecasts(*LLAMA, *words)[2]["training"]
    assert cut["gradients"] == trained  # four bytes, over four processes
    both = forecasts(*LLAMA, *words, "hardware.shard=both")[2]["training"]
    layers = estimate.outline.num_in_layers
    rest = estimate.outline.num_parameters - layers
    assert both["target weights, its share"] == 2 * (rest + layers / 4)
    assert "its fused kernels' copies" not in both


def test_less_is_kept_where_layers_are_computed_twice():
    words = ["recipe=dflash/qwen3-8b"]
    plain = forecasts(*words)[2]["training"]["activations"]
    twice = forecasts(*words, "train.gradient_checkpointing=true")[2]["training"]["activations"]
    assert twice < plain / 3


def test_captured_features_save_the_targets_pass_and_cost_disk():
    settings, estimate, stages = forecasts(*LLAMA)
    assert "target pass" in stages["training"]
    assert "hidden states" not in forecast_disk(settings, estimate)
    words = [*LLAMA, "regenerate.capture_features=true", "data.max_samples=100"]
    settings, estimate, stages = forecasts(*words)
    assert "target pass" not in stages["training"]
    a_token = 4 * 4096 * 2
    assert estimate.token_bytes == a_token
    assert forecast_disk(settings, estimate)["hidden states"] == 100 * 1124 * a_token


def test_hours_are_what_the_shares_of_the_peak_give():
    settings, estimate, _ = forecasts(*LLAMA)
    h100 = find_accelerator("h100")
    found = forecast_time(settings, estimate, h100)
    # 49,900 answers of 1,024 tokens, 64 at once; a step reads all weights but the embeddings, and
    # the memory of rows that are half written
    read = 2 * (8_030_261_248 - 128256 * 4096) + 64 * 612 * 131072
    step = read / (BANDWIDTH_SHARE * 3.35e12)
    prefill = 2 * 7.505e9 * 100 / (FLOPS_SHARE * 989e12)
    assert found.answers == pytest.approx(49_900 * (1024 * step / 64 + prefill) / 3600, rel=1e-3)
    assert found.plain_tokens_per_s == pytest.approx(1.675e12 / (2 * 7.505e9), rel=1e-3)
    assert found.training_tokens == 5 * 49_900 * 1124
    half = forecast_time(
        settings_of(*LLAMA, "hardware=ddp", "hardware.num_processes=2"), estimate, h100
    )
    assert half.training == pytest.approx(found.training / 2)
    assert half.answers == found.answers


def test_minutes_cut_the_tokens_as_they_cut_the_hours():
    settings, estimate, _ = forecasts(*LLAMA)
    whole = forecast_time(settings, estimate, find_accelerator("h100"))
    for share in (0.25, 2.0):
        minutes = f"train.max_minutes={whole.training * 60 * share}"
        found = forecast_time(settings_of(*LLAMA, minutes), estimate, find_accelerator("h100"))
        cut = min(1.0, share)
        assert found.training == pytest.approx(cut * whole.training)
        assert found.training_tokens == pytest.approx(cut * whole.training_tokens)


def test_minutes_bound_the_hours():
    settings, estimate, _ = forecasts(*LLAMA, "train.max_minutes=30")
    assert forecast_time(settings, estimate, find_accelerator("h100")).training == 0.5
    settings, estimate, _ = forecasts(*LLAMA, "train.max_minutes=30", "train.max_epochs=null")
    found = forecast_time(settings, estimate, find_accelerator("h100"))
    assert (found.training, found.training_tokens) == (0.5, None)


def test_a_trainer_of_a_published_speed_is_met_within_a_factor_of_two():
    """Eight A100: EAGLE-3 for Llama-3.1-8B, 200,000 samples of 2,048 tokens in 2 hours an epoch."""
    words = [*LLAMA, "hardware=ddp", "hardware.num_processes=8", "data.answers=given"]
    words += ["regenerate.capture_features=false", "data.max_samples=200000"]
    words += ["data.validation_fraction=0", "train.max_epochs=1", "data.max_tokens=2048"]
    settings, estimate, _ = forecasts(*words)
    found = forecast_time(settings, estimate, find_accelerator("a100"))
    assert 2.0 / 2 < found.training < 2.0 * 2
