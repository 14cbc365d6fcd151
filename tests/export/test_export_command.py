import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftlab.cli.export import _servable_name
from draftlab.cli.main import main
from draftlab.drafters.store import save_drafter
from draftlab.runs.run_dir import RunDir
from draftlab.settings.locate import conf_dir
from draftlab.targets.settings import TargetSettings
from draftlab.targets.tiny import tiny_target

FAKE = SimpleNamespace(folder="", architecture="", num_bytes=0, serve_command="")


@pytest.fixture(scope="module")
def qwen():
    return tiny_target("qwen3", dtype=torch.float32)


@pytest.fixture
def run(build, qwen, tmp_path):
    """A finished run: a target unlike the default one, and a drafter trained for it."""
    run = RunDir(tmp_path / "run")
    target = yaml.safe_load((conf_dir() / "target" / "tiny.yaml").read_text())
    run.write_config({"target": {**target, "family": "qwen3"}})
    extra = {"step": 3, "train": {"row_tokens": 48}}
    save_drafter(build("eagle3", on=qwen), run.checkpoint_path(3), extra=extra)
    run.point("latest", 3)
    return run


def test_a_run_is_exported_into_its_own_folder_for_its_own_target(run, capsys):
    assert main(["export", f"drafter={run.path}"]) == 0
    folder = run.export_path("vllm")
    config = json.loads((folder / "config.json").read_text())
    assert config["draftlab"]["base_model"] == "tiny-qwen3"
    assert config["draftlab"]["training_length"] == 48
    assert "| train.row_tokens | 48 |" in (folder / "README.md").read_text()
    printed = capsys.readouterr().out
    assert str(folder) in printed
    assert "vllm serve" in printed


def test_a_second_export_is_refused_until_asked_for(run, capsys):
    command = ["export", f"drafter={run.path}", f"out={run.path / 'a b'}"]
    assert main(command) == 0
    assert main(command) == 2
    assert "export.overwrite=true" in capsys.readouterr().err
    assert main([*command, "export.overwrite=true"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["drafter=eagle3"], "is a kind, not a trained drafter"),
        (["drafter=nowhere/at/all"], "nowhere/at/all"),
        (["drafter={run}", "export.formt=vllm"], "format"),
        (["drafter={run}", "export=hf"], "use export=vllm"),
        (["drafter={run}/checkpoints/step-000003", "export=trtllm"], "trtllm"),
    ],
)
def test_wrong_words_end_with_one_clear_error_and_exit_code_2(words, said, run, capsys):
    assert main(["export", *(word.format(run=run.path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not run.export_path("vllm").exists()
    assert not run.export_path("hf").exists()


def test_a_drafter_outside_a_run_needs_a_folder_to_go_to(build, tmp_path, capsys):
    save_drafter(build("medusa"), tmp_path / "m", extra={})
    words = ["export", f"drafter={tmp_path / 'm'}", "target=tiny"]
    assert main(words) == 2
    assert "out=FOLDER" in capsys.readouterr().err
    assert main([*words, f"out={tmp_path / 'served'}"]) == 0
    assert (tmp_path / "served" / "SHA256SUMS").is_file()


def test_weights_in_the_folder_are_those_of_the_checkpoint(run, build, qwen):
    main(["export", f"drafter={run.path}"])
    weights = load_file(run.export_path("vllm") / "model.safetensors")
    assert torch.equal(weights["fc.weight"], build("eagle3", on=qwen).fc.weight.detach())


def test_an_exported_folder_named_as_a_drafter_says_which_run_or_checkpoint_to_name(
    run, tmp_path, capsys
):
    served = tmp_path / "served"
    assert main(["export", f"drafter={run.path}"]) == 0
    assert main(["export", f"drafter={run.path}", f"out={served}"]) == 0
    assert main(["export", f"drafter={run.export_path('vllm')}"]) == 2
    assert f"pass the run {run.path} that it was made of" in capsys.readouterr().err
    assert main(["eval", f"drafters=[{served}]"]) == 2
    error = capsys.readouterr().err
    assert "is an export: serving engines read it, draftlab does not" in error
    assert f"pass the checkpoint {run.path.name}/step-000003" in error


@pytest.mark.parametrize("source", ["local", "gguf"])
def test_a_target_of_this_machine_is_served_from_any_folder(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = yaml.safe_load((conf_dir() / "target" / "tiny.yaml").read_text())
    settings = TargetSettings.model_validate({**target, "source": source, "name": "models/x"})
    assert _servable_name(settings) == str(tmp_path / "models" / "x")


@pytest.mark.parametrize(
    ("words", "pinned"),
    [([], "v1.0"), (["export.target_name_or_path=org/copy"], None)],
)
def test_the_revision_of_a_run_is_pinned_where_its_target_is_served(
    run, monkeypatch, words, pinned
):
    given = {}
    monkeypatch.setattr(
        "draftlab.export.base.export_drafter", lambda *_, **more: given.update(more) or FAKE
    )
    assert main(["export", f"drafter={run.path}", "target.revision=v1.0", *words]) == 0
    assert given["target_revision"] == pinned
