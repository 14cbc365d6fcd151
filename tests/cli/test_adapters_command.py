"""Adapters by command: one a domain on the same drafter, compared, exported merged, refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from draftlab.cli.main import main
from draftlab.drafters.store import read_card
from draftlab.runs.run_dir import list_runs

COMMON = ["drafter=eagle3", "hardware.threads=1", "data=jsonl", "data.answers=given"]
LORA = ["adapter=lora", "adapter.rank=4", "adapter.alpha=6", "optim=adamw", "optim.lr=0.02"]
SAID = {
    "support": "Please restart it, then try again.",
    "legal": "Subject to clause 7, it is void.",
}


def best_of(run):
    return run.pointed("best") or run.pointed("latest")


def train(folder, said, *words):
    """Train three steps on chats that end alike; nothing is held out, so nothing is probed."""
    path = folder / "chats.jsonl"
    chat = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": said}]
    path.write_text((json.dumps({"messages": chat}) + "\n") * 16)
    data = [f"data.paths={path}", "data.validation_fraction=0", "train.max_steps=3"]
    assert main(["train", *COMMON, *data, *words, f"paths.outputs={folder / 'outputs'}"]) == 0
    return list_runs(folder / "outputs")[-1]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return train(tmp_path_factory.mktemp("base"), "Yes.")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    words = [*LORA, f"init={base.path}"]
    return {domain: train(tmp_path_factory.mktemp(domain), SAID[domain], *words) for domain in SAID}


def test_each_domain_has_a_small_file_of_its_own_and_the_base_is_as_it_was(base, adapters):
    whole = best_of(base) / "drafter.safetensors"
    kept = {}
    for domain, run in adapters.items():
        folder = best_of(run)
        assert not (folder / "drafter.safetensors").exists()
        card = read_card(folder)
        assert card.adapter is not None
        assert card.adapter.base.sha256 == read_card(best_of(base)).sha256
        assert card.extra["adapter"] == {"kind": "lora", "rank": 4, "alpha": 6.0}
        file = folder / "adapter.safetensors"
        assert file.stat().st_size < whole.stat().st_size / 3
        kept[domain] = load_file(file)
    assert not torch.equal(kept["support"]["fc.lora_B.weight"], kept["legal"]["fc.lora_B.weight"])


def test_export_writes_base_plus_scale_b_a(base, adapters, tmp_path):
    run = adapters["support"]
    assert main(["export", f"drafter={run.path}", f"out={tmp_path / 'served'}"]) == 0
    served = load_file(tmp_path / "served" / "model.safetensors")
    below = load_file(best_of(base) / "drafter.safetensors")
    adapter = load_file(best_of(run) / "adapter.safetensors")
    a, b = adapter["fc.lora_A.weight"], adapter["fc.lora_B.weight"]
    assert b.abs().max() > 0
    assert torch.equal(served["fc.weight"], below["fc.weight"] + 6.0 / 4 * (b @ a))
    assert not torch.equal(served["fc.weight"], below["fc.weight"])
    assert torch.equal(served["norm.weight"], below["norm.weight"])
    assert "adapter.rank" in (tmp_path / "served" / "README.md").read_text()


@pytest.mark.slow
def test_base_and_adapters_are_compared_in_one_report(base, adapters, capsys):
    names = [str(run.path) for run in (base, adapters["support"], adapters["legal"])]
    words = ["eval=smoke", "debug=two_steps", "hardware.threads=1", "decode.num_draft_tokens=2"]
    assert main(["eval", f"drafters=[{','.join(names)}]", *words]) == 0
    summary = json.loads((base.eval_path("smoke") / "summary.json").read_text())
    assert len({arm["name"] for arm in summary["arms"]}) == 3
    assert "report" in capsys.readouterr().out


def test_an_adapter_goes_on_and_keeps_its_base(base, adapters, tmp_path, capsys):
    first = adapters["support"]
    run = train(tmp_path, SAID["support"], *LORA, f"init={first.path}", "optim.lr=0")
    before, after = (load_file(best_of(each) / "adapter.safetensors") for each in (first, run))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    saved = read_card(best_of(run)).adapter
    assert saved is not None
    assert saved.base.sha256 == read_card(best_of(base)).sha256
    words = ["train", "drafter=eagle3", *LORA, f"init={run.path}", "adapter.rank=8"]
    assert main([*words, f"paths.outputs={tmp_path}"]) == 2
    assert "pass adapter.rank=4 adapter.alpha=6" in capsys.readouterr().err


def test_a_base_that_is_gone_or_another_is_told_and_a_copy_inside_will_do(
    base, adapters, tmp_path, capsys
):
    moved = tmp_path / "moved"
    shutil.copytree(best_of(adapters["legal"]), moved)
    card = json.loads((moved / "drafter.json").read_text())
    place = tmp_path / "elsewhere"
    card["adapter"]["base"] |= {"path": str(place), "relative": "../elsewhere"}
    (moved / "drafter.json").write_text(json.dumps(card))
    words = ["generate", f"drafter={moved}", "target=tiny", "prompt=Well?", "hardware.threads=1"]
    words += ["decode.max_new_tokens=4"]
    assert main(words) == 2
    assert f"{place} is gone; put that drafter's folder back" in capsys.readouterr().err

    shutil.copytree(best_of(base), place)
    other = json.loads((place / "drafter.json").read_text()) | {"sha256": "0" * 64}
    (place / "drafter.json").write_text(json.dumps(other))
    assert main(words) == 2
    assert f"another one lies in {place}" in capsys.readouterr().err.replace("moved/../", "")

    shutil.copytree(best_of(base), moved / "base")
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (LORA, "drafter=eagle3 without init would start untrained"),
        ([*LORA, "init={base}", "optim=muon"], "pass optim=adamw"),
        (["adapter.rank=8", "init={base}"], "with kind=none; expected both with adapter=lora"),
        (["adapter=lora", "adapter.rank=0", "init={base}"], "adapter.rank='0'"),
        ([*LORA, "adapter.rank=100000", "init={base}"], "adapter.rank=100000 is above the smaller"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_adapters_that_cannot_work_are_refused_before_anything_is_made(
    command, words, message, base, tmp_path, capsys
):
    words = [word.format(base=base.path) for word in words]
    assert main([command, "drafter=eagle3", f"paths.outputs={tmp_path}", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_check_says_what_is_trained(base, tmp_path, capsys):
    words = ["check", "drafter=eagle3", *LORA, f"init={base.path}"]
    assert main([*words, f"paths.outputs={tmp_path}"]) == 0
    assert "adapters of rank 4, alpha 6; the drafter stays as it is" in capsys.readouterr().out
