"""Every recipe composes, and `draftlab check` estimates it where no hub is in reach."""

import json

import pytest

from draftlab.cli.main import main
from draftlab.cli.recipes import about_of
from draftlab.settings.compose import compose
from draftlab.settings.locate import recipe_names

CHAT = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]}


def check(name, capsys, *words):
    code = main(["check", f"recipe={name}", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


@pytest.fixture
def asked_for(tmp_path):
    """What recipes leave open: chats of one's own, and a drafter that was published."""
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps(CHAT) + "\n") * 3)
    return {"init": "init=owner/drafter", "data.paths": f"data.paths={path}"}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_checked_and_estimated_offline(name, asked_for, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = compose("train", [f"recipe={name}"]).data
    words = [asked_for["init"]] if data["init"] == "???" else []
    words += [asked_for["data.paths"]] if data["data"]["kind"] == "jsonl" else []
    said = check(name, capsys, *words)
    assert "all settings are valid" in said
    assert "estimated, GB of 10^9 bytes" in said
    assert "target weights" in said
    if data["target"]["source"] == "hub":
        assert "sizes: published ones; the hub gave no config.json" in said
        assert "licence " in said
        assert "time, estimated for" in said


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_needs_and_where_its_method_is_described(name):
    about = about_of(name)
    assert about["paper"].startswith("arXiv:")
    assert about["needs"]
    assert (about["tau"] is None) or about["hours"] is not None


# sizes by hand: GB of 10^9 bytes, bfloat16
LLAMA_LAYER = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096
LLAMA = 2 * 128256 * 4096 + 32 * LLAMA_LAYER + 4096
EXPERTS = 48 * 128 * 3 * 2048 * 768
QWEN_LAYER = 2048 * 4096 * 2 + 2048 * 512 * 2 + 2 * 128 + 128 * 2048 + 2 * 2048
QWEN = 2 * 151936 * 2048 + 48 * QWEN_LAYER + 2048 + EXPERTS


def line_of(said, start):
    return next(line.split() for line in said.splitlines() if line.strip().startswith(start))


def test_llama_8b_takes_16_gb_and_128_kib_of_memory_a_token(capsys):
    said = check("eagle3/llama3.1-8b-instruct", capsys)
    assert round(2 * LLAMA / 1e9, 2) == 16.06
    assert f"{LLAMA / 1e9:.2f} billion parameters, bfloat16" in said
    assert line_of(said, "target weights")[-1] == f"{2 * LLAMA / 1e9:.2f}"
    a_token = 2 * 32 * 8 * 128 * 2
    assert a_token == 128 * 1024
    held = 64 * 2048 * a_token / 1e9
    assert line_of(said, "keys and values of 64 rows")[-1] == f"{held:.2f}"
    assert "is gated: accept the Llama 3.1 Community License" in said


def test_qwen_30b_a3b_takes_61_gb_and_passes_3_billion_weights_a_token(capsys):
    said = check("eagle3/qwen3-30b-a3b", capsys)
    assert round(2 * QWEN / 1e9, 2) == 61.06
    # the table of embeddings is read, not multiplied
    active = QWEN - EXPERTS * 120 // 128 - 151936 * 2048
    assert (
        f"{QWEN / 1e9:.2f} billion parameters ({active / 1e9:.2f} billion for a token: 8 of 128 "
        "experts a layer)"
    ) in said
    assert line_of(said, "target weights")[-1] == f"{2 * QWEN / 1e9:.2f}"
    assert "gated" not in said


def test_llama_70b_fits_on_no_device_alone_and_does_when_cut(capsys):
    cut = check("distill/llama3.3-70b-with-3.2-1b", capsys)
    assert "warning: training may take" not in cut
    assert "holds the whole target in host memory: 1129 GB" in cut
    assert "1.24 billion parameters, 1.24 billion of them trained" in cut
    whole = check("distill/llama3.3-70b-with-3.2-1b", capsys, "hardware.shard=drafter")
    assert line_of(whole, "target weights")[-1] == "141.11"
    assert "GB a device, and H100 80 GB has 80" in whole


def test_t5_is_sent_to_eval(capsys):
    said = check("seq2seq/flan-t5-xxl-with-small", capsys)
    assert "measure it: draftlab eval recipe=seq2seq/flan-t5-xxl-with-small" in said
    assert "has an encoder: draftlab decodes with it" in said
    assert line_of(said, "target weights")[-1] == f"{2 * 11_135_332_352 / 1e9:.2f}"


def test_the_t5_recipe_serves_the_commands_it_is_for():
    for command in ("eval", "generate"):
        data = compose(command, ["recipe=seq2seq/flan-t5-xxl-with-small"]).data
        assert data["drafter"]["model"] == "google/flan-t5-small"
        assert data["target"]["name"] == "google/flan-t5-xxl"
