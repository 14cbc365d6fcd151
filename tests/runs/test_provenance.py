import json
import subprocess

from draftlab.runs import provenance
from draftlab.runs.provenance import collect_provenance, describe_code, strike_secrets


def test_provenance_is_plain_data_without_the_environment(monkeypatch):
    monkeypatch.setenv("SOME_PRIVATE_THING", "value-that-must-not-appear")
    data = collect_provenance(seed=7, argv=["draftlab", "train", "init=My Run (1)"])
    text = json.dumps(data)
    assert data["seed"] == 7
    assert data["command"] == "draftlab train 'init=My Run (1)'"
    assert data["versions"]["torch"]
    assert data["machine"]["cores"] >= 1
    assert "value-that-must-not-appear" not in text


def test_a_secret_on_the_command_line_is_struck_out(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    data = collect_provenance(seed=0, argv=["draftlab", "train", "about.paper=0123456789abcdef"])
    assert data["command"].endswith("<WANDB_API_KEY>'") or data["command"].endswith(
        "<WANDB_API_KEY>"
    )
    assert "0123456789abcdef" not in json.dumps(data)


def test_short_or_harmless_variables_strike_nothing():
    environ = {"KEYBOARD": "us", "HOME": "/home/ann", "HF_TOKEN": "hf_abcdefgh"}
    assert strike_secrets("us /home/ann hf_abcdefgh", environ) == "us /home/ann <HF_TOKEN>"


def test_uncommitted_changes_of_a_checkout_change_the_hash(tmp_path, monkeypatch):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True)

    monkeypatch.setattr(provenance, "checkout_dir", lambda: tmp_path)
    assert describe_code() == {"git_commit": None, "git_changes_sha256": None}
    git("init")
    (tmp_path / "x.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "x")
    clean = describe_code()
    (tmp_path / "x.py").write_text("a = 2\n")
    dirty = describe_code()
    assert len(clean["git_commit"]) == 40
    assert clean["git_changes_sha256"] is None
    assert len(dirty["git_changes_sha256"]) == 64
    assert dirty["git_commit"] == clean["git_commit"]


def test_an_installed_package_has_no_commit(monkeypatch):
    monkeypatch.setattr(provenance, "checkout_dir", lambda: None)
    assert describe_code()["git_commit"] is None
