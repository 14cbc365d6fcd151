"""Encoder-decoder targets from the command line: no chat template, so they read plain text."""

import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from draftlab.cli.main import main
from draftlab.targets.tiny import tiny_tokenizer

QUICK = ["hardware.threads=1", "target.dtype=float32"]


def write_t5(folder, seed):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    config = AutoConfig.for_model(
        "t5",
        vocab_size=320,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    large, small = write_t5(folder / "large", 0), write_t5(folder / "small", 1)
    draft = ["drafter=draft_model", "drafter.start=pretrained", f"drafter.model={small}"]
    return ["target=local", f"target.name={large}", *draft, *QUICK]


def test_a_question_is_answered_as_by_the_target_alone(words, capsys):
    asked = ["prompt=translate: Is it on?", "decode.max_new_tokens=12"]
    assert main(["generate", *words, *asked]) == 0
    drafted = capsys.readouterr()
    plain = [word for word in words if not word.startswith("drafter")]
    assert main(["generate", *plain, "drafter=ngram", *asked]) == 0
    assert drafted.out == capsys.readouterr().out
    assert "tau" in drafted.err


def test_a_chat_is_one_text_and_tools_are_refused(words, tmp_path, capsys, monkeypatch):
    from draftlab.data import plain_text
    from draftlab.targets import asking

    seen = []

    def spy(tokenizer, *rest):
        seen.append(tokenizer.decode(plain_text.encode_plain_prompt(tokenizer, *rest)))
        return plain_text.encode_plain_prompt(tokenizer, *rest)

    monkeypatch.setattr(asking, "encode_plain_prompt", spy)
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi?"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat}) + "\n")
    few = ["decode.max_new_tokens=4"]
    assert main(["generate", *words, f"prompts={path}", *few]) == 0
    assert seen == ["Be short.\n\nHi?<|im_end|>"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    path.write_text(json.dumps({"messages": chat, "tools": tools}) + "\n")
    assert main(["generate", *words, f"prompts={path}", *few]) == 2
    assert "no chat template, so tools" in capsys.readouterr().err


def test_a_suite_is_measured_and_audited(words, tmp_path, capsys):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"translate: {n}"}) + "\n" for n in range(5)))
    few = ["eval=smoke", f"eval.prompts={path}", "eval.max_new_tokens=6"]
    few += ["eval.speed_max_new_tokens=6", "eval.draft_lengths=[2]", "eval.draft_length_prompts=1"]
    outputs = tmp_path / "outputs"
    assert main(["eval", *words, *few, f"paths.outputs={outputs}"]) == 0
    (summary,) = outputs.rglob("summary.json")
    (arm,) = json.loads(summary.read_text())["arms"]
    assert arm["audit"]["num_positions"] > 0
    assert arm["audit"]["num_defects"] == 0


def test_decoding_is_timed_beside_transformers(words, tmp_path, capsys):
    out = tmp_path / "bench.json"
    few = ["bench.prompts=2", "bench.tokens=6", f"bench.out={out}"]
    assert main(["bench", "decode", *words, *few]) == 0
    names = [line["arm"] for line in json.loads(out.read_text())["arms"]]
    assert "draftlab draft_model" in names


def test_training_is_refused_before_any_work(words, tmp_path, capsys):
    assert main(["train", *words, f"paths.outputs={tmp_path}"]) == 2
    assert "trains nothing for it; measure it with draftlab eval" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
