"""A model that also sees images serves as its text part: Gemma-3's larger ones come that way."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftlab.targets.step import Step
from draftlab.targets.target import build_target
from draftlab.targets.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def target():
    tokenizer = tiny_tokenizer()
    text = {
        "model_type": "gemma3_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": 0.14,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
        "vision_use_head": False,
    }
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).double()
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    return build_target(model, tokenizer, name="tiny-gemma3", source="tiny")


def test_the_gate_admits_it_with_five_windows_of_six(target):
    assert target.speculation_refusal is None
    assert target.report["windows"] == [8] * 5 + [None]
    assert (target.spec.num_layers, target.spec.hidden_size) == (6, 64)


def test_steps_equal_whole_passes_past_the_window(target):
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    whole = target.forward_plainly(ids).logits[0]
    kv = target.open_kv(1, 32)
    rows = torch.tensor([0])
    first = target.run(kv, Step(rows, ids[:, :19], torch.tensor([0]), 19)).logits[0]
    rest = target.run(kv, Step(rows, ids[:, 19:], torch.tensor([19]), 24)).logits[0]
    assert float((torch.cat([first, rest]) - whole).abs().max()) < 1e-9
