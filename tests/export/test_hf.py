import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftlab.errors import NotExportable
from draftlab.export.base import export_drafter
from draftlab.targets.fingerprint import fingerprint_tokenizer
from draftlab.targets.tiny import build_tiny_model, tiny_target

IDS = torch.tensor([[3, 17, 99, 42, 250, 8]])


def test_transformers_computes_the_trained_draft_logits_from_the_folder(
    target, build, drafted, settings, tmp_path
):
    drafter = build("draft_model")
    _, next_ids, tokens, log_probs, _ = drafted(target, drafter)
    export_drafter(drafter, target.view, settings("hf"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    whole = torch.cat([IDS[0, :1], next_ids, tokens]).unsqueeze(0)
    known = target.spec.num_token_ids
    with torch.no_grad():
        logits = model(whole).logits[0, -len(tokens) - 1 : -1, :known]
    told = logits.log_softmax(-1).clamp_min(-80)
    torch.testing.assert_close(told, log_probs[:, :known], atol=1e-5, rtol=1e-5)


def test_the_folder_serves_as_assistant_of_generate(target, build, settings, tmp_path):
    export_drafter(build("draft_model"), target.view, settings("hf"), tmp_path / "out")
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model = build_tiny_model(dtype=torch.float32)
    plain = model.generate(IDS, max_new_tokens=12, do_sample=False)
    assisted = model.generate(IDS, max_new_tokens=12, do_sample=False, assistant_model=assistant)
    assert torch.equal(plain, assisted)


def test_the_tokenizer_and_end_tokens_are_the_targets(target, build, settings, tmp_path):
    export_drafter(build("draft_model"), target.view, settings("hf"), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert fingerprint_tokenizer(tokenizer) == target.spec.tokenizer_sha256
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == list(target.spec.eos_ids)
    assert model.generation_config.num_assistant_tokens > 0


def test_the_card_says_both_ways_to_use_it(target, build, settings, tmp_path):
    result = export_drafter(build("draft_model"), target.view, settings("hf"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"method": "draft_model"' in result.serve_command
    assert result.serve_command in card
    assert "library_name: transformers" in card
    assert "assistant_model=assistant" in card


@pytest.mark.parametrize(
    ("kind", "form", "advice"),
    [
        ("eagle3", "hf", "use export=vllm"),
        ("medusa", "hf", "use export=vllm"),
        ("draft_model", "vllm", "export=hf writes a folder that vLLM serves as well"),
        ("ngram", "vllm", "prompt_lookup_max"),
    ],
)
def test_a_drafter_the_format_cannot_hold_is_refused_with_the_way_out(
    kind, form, advice, target, build, settings, tmp_path
):
    with pytest.raises(NotExportable, match=advice):
        export_drafter(build(kind), target.view, settings(form), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_tied_embeddings_are_stored_once_and_tied_again(build, settings, tmp_path):
    tied = tiny_target(dtype=torch.float32, tie_word_embeddings=True)
    drafter = build("draft_model", on=tied)
    export_drafter(drafter, tied.view, settings("hf"), tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    own = drafter.model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, own)
