"""`init=DRAFTER`: an existing drafter goes on with new data, its vocabulary locked (case O-19)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from draftlab.cli.launch import compose_run
from draftlab.cli.main import main
from draftlab.cli.schema import parse_drafter
from draftlab.drafters.store import build_drafter, save_drafter
from draftlab.runs.run_dir import list_runs
from draftlab.settings.compose import compose
from draftlab.targets.tiny import tiny_target

CHAT = {
    "messages": [{"role": "user", "content": "¿Qué?"}, {"role": "assistant", "content": "zzzz"}]
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("first")
    words = ["drafter.draft_vocab_size=96", "train.max_steps=3", "hardware.threads=1"]
    assert main(["train", *words, f"paths.outputs={outputs}"]) == 0
    return list_runs(outputs)[-1]


def go_on(trained, folder, *words):
    """Train further on other text, whose most frequent tokens are others."""
    path = folder / "mine.jsonl"
    path.write_text((json.dumps(CHAT) + "\n") * 8)
    data = ["data=jsonl", f"data.paths={path}", "data.validation_fraction=0"]
    common = ["train.max_steps=1", "hardware.threads=1", f"paths.outputs={folder}"]
    assert main(["train", f"init={trained.path}", *data, *common, *words]) == 0
    return list_runs(folder)[-1]


def tensors_of(run):
    return load_file(run.pointed("latest") / "drafter.safetensors")


def test_a_step_that_learns_nothing_leaves_every_number_as_it_was(trained, tmp_path):
    run = go_on(trained, tmp_path, "optim.lr=0", "optim.adamw_lr=0")
    before = load_file(
        (trained.pointed("best") or trained.pointed("latest")) / "drafter.safetensors"
    )
    after = tensors_of(run)
    assert before.keys() == after.keys()
    assert len(before["draft_vocab_ids"]) == 96
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_new_data_moves_the_weights_and_never_the_vocabulary(trained, tmp_path):
    after = tensors_of(go_on(trained, tmp_path, "optim.lr=0.1"))
    before = load_file(
        (trained.pointed("best") or trained.pointed("latest")) / "drafter.safetensors"
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert "draft_vocab_ids" not in changed


def test_another_kind_is_refused_with_the_right_one(trained, tmp_path, capsys):
    words = [f"init={trained.path}", "drafter=eagle3", f"paths.outputs={tmp_path}"]
    assert main(["train", *words, "hardware.threads=1"]) == 2
    assert "pass drafter=medusa" in capsys.readouterr().err
    assert not (tmp_path / "adhoc").exists()


@pytest.fixture
def refuse(trained, tmp_path, capsys, monkeypatch):
    """Give what `train init=...` says that must be refused before a target or a folder is made."""

    def load(*_, **__):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("draftlab.cli.train_job.load_target", load)
    outputs = tmp_path / "out"

    def run(*words, init=None, command="train"):
        common = ["hardware.threads=1", f"paths.outputs={outputs}"]
        assert main([command, f"init={init or trained.path}", *common, *words]) == 2
        assert not outputs.exists()
        return capsys.readouterr().err

    return run


def test_another_kind_is_refused_before_anything_heavy(refuse):
    assert "is a drafter of kind medusa, but drafter=eagle3; pass drafter=medusa" in refuse(
        "drafter=eagle3"
    )


@pytest.mark.parametrize("command", ["train", "check"])
def test_typed_keys_that_the_drafter_does_not_have_are_refused_by_name(refuse, command):
    words = ["drafter.num_heads=8", "drafter.num_blocks=1", "drafter.draft_vocab_size=null"]
    said = refuse(*words, command=command)
    assert "keeps its own settings and draft vocabulary" in said
    assert "drafter.num_heads=8 (it has 4)" in said
    assert "drafter.draft_vocab_size=null (it has 96)" in said
    assert "num_blocks" not in said
    assert "decode.num_draft_tokens" in said


def test_a_recipes_keys_that_the_drafter_does_not_have_are_refused(refuse, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# @package _global_\ndrafter: {num_blocks: 3, draft_vocab_size: 96}\n")
    said = refuse(f"recipe={path}")
    assert "drafter.num_blocks=3 (it has 1); drop drafter.num_blocks or take another recipe" in said


def test_a_hub_drafter_takes_no_keys_since_its_own_are_not_known_yet(refuse):
    said = refuse("drafter.num_heads=4", init="someone/head")
    assert "init=someone/head keeps its own settings" in said
    assert "drop drafter.num_heads" in said


def test_the_runs_config_holds_the_drafters_own_settings(trained, tmp_path):
    run = go_on(trained, tmp_path, "drafter.num_heads=4")
    assert run.read_config()["drafter"] == trained.read_config()["drafter"]
    card = json.loads((run.checkpoint_path(1) / "drafter.json").read_text())
    assert run.read_config()["drafter"]["draft_vocab_size"] == 96
    assert card["settings"] == run.read_config()["drafter"]


def test_a_downloaded_drafters_settings_are_written_into_the_config(trained, tmp_path, monkeypatch):
    folder = trained.pointed("latest")
    for place in ("train_job", "continuing", "drafters"):
        monkeypatch.setattr(f"draftlab.cli.{place}.find_drafter_folder", lambda _: folder)
    monkeypatch.chdir(tmp_path)
    words = ["train.max_steps=1", "hardware.threads=1", f"paths.outputs={tmp_path}"]
    assert main(["train", "init=someone/head", *words]) == 0
    (run,) = list_runs(tmp_path)
    assert run.read_config()["drafter"]["draft_vocab_size"] == 96


@pytest.mark.parametrize("recipe", ["company/finetune", "company/adapter"])
def test_the_company_recipes_take_over_whatever_drafter_they_are_given(recipe, tmp_path):
    own = parse_drafter(
        compose("train", ["drafter=eagle3", "drafter.unroll_steps=2"]).data["drafter"]
    )
    save_drafter(build_drafter(own, tiny_target().view), tmp_path, extra={})
    settings, _ = compose_run([f"recipe={recipe}", f"init={tmp_path}", "data.paths=mine.jsonl"])
    assert settings.drafter == own
