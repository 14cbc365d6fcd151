import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftlab.data.batch import TokenBatch
from draftlab.errors import UnsupportedTarget
from draftlab.targets.adapter import HFDoor, ProbeReport
from draftlab.targets.features import FeatureRequest
from draftlab.targets.gate import refusal_of_probe
from draftlab.targets.step import Step
from draftlab.targets.target import build_target
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LINEAR_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REFUSED = {
    "recurrent": ("mamba", {"state_size": 8}, "recurrent state"),
    "hybrid": (
        "qwen3_next",
        {
            **LINEAR_HEADS,
            **EXPERTS,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "linear_attention",
    ),
    "dynamic rope": ("llama", {"rope_parameters": DYNAMIC}, "rotary table changes"),
    "attention of its own": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "position_ids"),
    "one cache length": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, "one sequence length"),
}


def build(kind, sizes, **more):
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes}, **more)
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).to(torch.float64)


@pytest.fixture(scope="module", params=REFUSED)
def refused(request):
    kind, sizes, reason = REFUSED[request.param]
    target = build_target(build(kind, sizes), tiny_tokenizer(), name=request.param, source="tiny")
    return target, reason


def test_the_refusal_says_why_and_is_recorded(refused):
    target, reason = refused
    assert reason in target.speculation_refusal
    assert target.report["refusal"] == target.speculation_refusal


def test_a_refused_target_does_not_run_in_silence(refused, random_ids):
    target, reason = refused
    with pytest.raises(UnsupportedTarget, match=reason):
        target.open_kv(1, 8)
    step = Step(torch.tensor([0]), random_ids(1, 2), torch.tensor([0]), 2)
    kv = tiny_target("llama", num_hidden_layers=2).open_kv(1, 8)
    with pytest.raises(UnsupportedTarget, match="plain answering still work"):
        target.run(kv, step)


def test_a_refused_target_answers_as_transformers_does(refused, random_ids):
    target, _ = refused
    ids = random_ids(2, 9)
    found = target.forward_plainly(ids).logits
    with torch.no_grad():
        expected = target.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected)


def test_a_refused_target_still_gives_training_features(refused, random_ids):
    target, _ = refused
    a, b = random_ids(6, seed=1), random_ids(5, seed=2)
    ids = torch.cat([a, b, torch.zeros(1, dtype=torch.long)]).unsqueeze(0)
    segments = torch.tensor([[0] * 6 + [1] * 5 + [-1]])
    positions = torch.tensor([[*range(6), *range(5), 0]])
    batch = TokenBatch(ids, segments >= 0, positions, segments, segments)
    found = target.read_features(batch, FeatureRequest((1, 2), wants_final=True))
    entered = []
    second = target.reference.anatomy.layers[1]
    hook = second.register_forward_pre_hook(lambda module, args: entered.append(args[0].clone()))
    with torch.no_grad():
        out = target.model(input_ids=b.unsqueeze(0), use_cache=False, output_hidden_states=True)
    hook.remove()
    torch.testing.assert_close(found.taps[0, 6:11, 0], entered[0][0])
    torch.testing.assert_close(found.final[0, 6:11], out.hidden_states[-1][0])
    assert not found.final.is_inference()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_fixed_rope_scalings_are_admitted(rope):
    target = tiny_target("llama", rope_parameters=rope)
    assert target.speculation_refusal is None
    assert target.report["stepwise_difference"] < 1e-12


def test_longrope_is_admitted_up_to_its_original_length():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
        "long_factor": [2.0] * 8,
        "short_factor": [1.0] * 8,
    }
    model = build_tiny_model(
        "llama",
        model_type="phi3",
        original_max_position_embeddings=128,
        rope_parameters=rope,
    )
    target = build_target(model, tiny_tokenizer(), name="x", source="tiny")
    assert target.speculation_refusal is None
    assert target.spec.max_positions == 128


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
        ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
        ("cohere2", {"sliding_window": 8}),
    ],
)
def test_scaled_and_capped_logits_are_known(kind, more):
    target = build_target(build(kind, more), tiny_tokenizer(), name=kind, source="tiny")
    assert target.speculation_refusal is None
    assert target.report["head_difference"] < 1e-6


def test_an_unknown_scale_of_the_logits_is_refused():
    model = build_tiny_model("llama", num_hidden_layers=2)
    plain = model.forward

    @functools.wraps(plain)
    def doubled(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = doubled
    target = build_target(model, tiny_tokenizer(), name="x", source="tiny")
    assert "known scale or cap" in target.speculation_refusal


def test_a_layer_that_looks_at_its_cache_in_secret_is_refused():
    model = build_tiny_model("llama", num_hidden_layers=2)
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    @functools.wraps(plain)
    def twice(*args, **kwargs):
        plain(*args, **kwargs)
        return plain(*args, **kwargs)

    attention.forward = twice
    target = build_target(model, tiny_tokenizer(), name="x", source="tiny")
    assert "attention ran 3 times" in target.speculation_refusal


def probe_of(count=4, **changes):
    report = ProbeReport(
        calls=count,
        windows=dict.fromkeys(range(count)),
        shapes=dict.fromkeys(range(count), (2, 16, 16)),
    )
    for name, value in changes.items():
        setattr(report, name, value)
    return report


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"calls": 3}, "attention ran 3 times"),
        ({"unknown": {"position_bias"}}, "position_bias"),
        ({"non_causal": {1}}, "look ahead"),
        ({"shapes": {0: (2, 16, 16), 1: (2, 16, 16), 2: (1, 16, 16), 3: (2, 16, 16)}}, "shapes"),
        ({"shapes": dict.fromkeys(range(4), (1, 16, 8))}, "shapes"),
    ],
)
def test_what_a_probe_pass_shows_can_refuse(changes, reason):
    door = HFDoor(build_tiny_model("llama"))
    assert refusal_of_probe(door, probe_of()) is None
    assert reason in refusal_of_probe(door, probe_of(**changes))


def test_windows_that_contradict_the_config_are_refused():
    door = HFDoor(build_tiny_model("gemma3"))
    windows = {0: 8, 1: None, 2: 8, 3: None}
    assert refusal_of_probe(door, probe_of(windows=windows)) is None
    assert "config says" in refusal_of_probe(door, probe_of(windows={**windows, 3: 8}))
