import hashlib
import json
import shlex

import pytest
import torch
import yaml

from draftlab.errors import ConfigError
from draftlab.export import base
from draftlab.export.base import export_drafter, format_class, format_names
from draftlab.export.settings import ExportSettings
from draftlab.settings.locate import conf_dir


def test_the_formats_are_the_files_of_the_room():
    assert format_names() == ["hf", "vllm"]
    assert format_class("vllm").name == "vllm"


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'gguf'.*hf, vllm"):
        format_class("gguf")


@pytest.mark.parametrize("form", ["vllm", "hf"])
def test_every_setting_stands_in_its_yaml(form):
    data = yaml.safe_load((conf_dir() / "export" / f"{form}.yaml").read_text())
    assert set(data) == set(ExportSettings.model_fields)
    assert ExportSettings(**data).format == form


def test_the_checksums_are_those_of_the_files(target, build, settings, tmp_path):
    result = export_drafter(build("eagle3"), target.view, settings(), tmp_path / "out")
    lines = (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()
    assert len(lines) == 3
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
        assert result.sha256[name] == digest


def test_the_serve_command_survives_the_shell(target, build, settings, tmp_path):
    folder = tmp_path / "it's mine (1) ü"
    result = export_drafter(
        build("eagle3"),
        target.view,
        settings(num_draft_tokens=6, target_name_or_path="org/model"),
        folder,
    )
    assert "(1) ü" in result.serve_command
    words = shlex.split(result.serve_command)
    assert words[:4] == ["vllm", "serve", "org/model", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": 6,
    }


def test_a_pinned_target_is_served_as_it_was_loaded(target, build, settings, tmp_path):
    result = export_drafter(
        build("eagle3"),
        target.view,
        settings(target_name_or_path="org/model"),
        tmp_path / "out",
        target_revision="v1.0",
    )
    words = shlex.split(result.serve_command)
    assert words[:5] == ["vllm", "serve", "org/model", "--revision", "v1.0"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert result.serve_command in card
    assert "| revision | v1.0 |" in card


def test_the_card_names_base_model_licence_tags_training_and_command(
    target, build, settings, tmp_path
):
    result = export_drafter(
        build("eagle3"),
        target.view,
        settings(target_name_or_path="org/model", license="apache-2.0"),
        tmp_path / "out",
        history={"step": 40, "train": {"row_tokens": 64}, "training_length": 64},
    )
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "org/model"
    assert front["license"] == "apache-2.0"
    assert front["library_name"] == "vllm"
    assert "speculative-decoding" in front["tags"]
    assert result.serve_command in card
    assert "| train.row_tokens | 64 |" in card
    assert "rows of at most 64 tokens" in card


def test_the_card_of_a_local_target_tells_no_folder_of_this_machine_as_base_model(
    target, build, settings, tmp_path
):
    export_drafter(
        build("eagle3"), target.view, settings(target_name_or_path="/data/models/m"), tmp_path / "o"
    )
    front = yaml.safe_load((tmp_path / "o" / "README.md").read_text().split("---")[1])
    assert front["base_model"] == "tiny-llama"


def test_an_earlier_export_is_kept_unless_asked_to_replace_it(target, build, settings, tmp_path):
    folder = tmp_path / "out"
    export_drafter(build("eagle3"), target.view, settings(), folder)
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"export\.overwrite=true"):
        export_drafter(build("medusa"), target.view, settings(), folder)
    assert (folder / "config.json").read_bytes() == before
    export_drafter(build("medusa"), target.view, settings(overwrite=True), folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "medusa"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_no_export_is_never_replaced(target, build, settings, tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="is no export"):
        export_drafter(build("eagle3"), target.view, settings(overwrite=True), tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_a_crash_before_the_end_leaves_nothing_behind(
    target, build, settings, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(base, "write_card", fail)
    with pytest.raises(OSError, match="disk full"):
        export_drafter(build("eagle3"), target.view, settings(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_exporting_changes_no_weight_of_the_drafter(target, build, settings, tmp_path):
    drafter = build("eagle3", train_head=True)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    after = drafter.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
