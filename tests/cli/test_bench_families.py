"""`draftlab bench families` on a tiny target: one answering, a row a family, and going on."""

import json
import logging

import pytest
import torch

from draftlab.cli import bench_families
from draftlab.cli.main import main
from draftlab.runs.metrics_log import read_metrics
from draftlab.runs.run_dir import list_runs

SMALL = (
    "target=tiny",
    "target.kernels=reference",
    "data.max_samples=12",
    "regenerate.max_new_tokens=12",
    "minutes=0.2",
    "train.max_steps=2",
    "train.save_every_steps=1",
    "train.row_tokens=128",
    "train.precision=no",
    "eval.prompts_per_domain=1",
    "eval.max_new_tokens=6",
    "eval.speed_max_new_tokens=4",
    "eval.draft_lengths=[1,2]",
    "eval.draft_length_prompts=2",
    "hardware.threads=1",
)
UNTIMED = ("eval.speed_prompts_per_domain=0", "eval.draft_lengths=[]")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The command in a folder of its own, without the plots of its reports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(logging.getLogger("draftlab"), "level", logging.WARNING)
    monkeypatch.setattr(
        "draftlab.reports.html.write_report", lambda folder, given, **more: (folder, folder)
    )
    monkeypatch.setattr("draftlab.cli.probe._NUM_PROMPTS", 2)
    monkeypatch.setattr("draftlab.cli.probe._MAX_NEW_TOKENS", 6)
    threads = torch.get_num_threads()
    yield lambda *words: main(["bench", "families", *SMALL, *words])
    torch.set_num_threads(threads)


def only_bench(folder):
    (run,) = list_runs(folder / "outputs" / "bench-families")
    return run


def test_families_share_the_answers_and_get_a_row_each(bench, tmp_path, capsys):
    assert bench("families=[eagle3,medusa]") == 0
    out = capsys.readouterr().out
    assert "family 1 of 2: eagle3" in out
    assert "left" in out
    run = only_bench(tmp_path)
    assert run.is_finished
    assert len(list((tmp_path / "outputs" / "answers").iterdir())) == 1
    table = json.loads((run.path / "table.json").read_text())
    assert [row["family"] for row in table["families"]] == ["eagle3", "medusa"]
    assert 6 < table["answers"]["num_prompts"] <= 12  # the tiny target reads 512 bytes
    for row in table["families"]:
        assert row["tau"]["low"] is not None  # 8 prompts or more, pooled
        assert len(row["tau_by_domain"]) >= 8
        assert row["training"]["num_steps"] == 2
        assert row["num_defects"] == 0
        assert row["draft_ratio"] > 0
        assert row["speedup"]["value"] > 0
        assert [probe["step"] for probe in row["probes"]] == [1, 2]
    text = (run.path / "table.md").read_text()
    for told in (
        "## Families",
        "## tau by domain",
        "lowest loss",
        "1 thread,",
        "domains, at most 6",
    ):
        assert told in text
    sums = [
        json.loads((folder / "checkpoints" / "plan.json").read_text())["rows_checksum"]
        for folder in (run.path / "families").iterdir()
    ]
    assert sums[0] == sums[1]


def test_equal_words_go_on_and_further_families_join(bench, tmp_path, monkeypatch, capsys):
    trained = []
    train = bench_families.train_drafter

    def count(run, *rest, **named):
        trained.append(run.path.name.partition("-")[0])
        return train(run, *rest, **named)

    measure = bench_families.measure_drafters

    def stop(*rest, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_families, "train_drafter", count)
    monkeypatch.setattr(bench_families, "measure_drafters", stop)
    assert bench(*UNTIMED, "families=[medusa]") == 130
    assert not only_bench(tmp_path).is_finished
    monkeypatch.setattr(bench_families, "measure_drafters", measure)
    assert bench(*UNTIMED, "families=[medusa]") == 0
    assert trained == ["medusa"]
    assert bench(*UNTIMED, "families=[medusa,eagle]") == 0
    assert trained == ["medusa", "eagle"]
    assert bench(*UNTIMED, "families=[medusa,eagle]", "eagle.optim.lr=1e-4") == 0
    assert trained == ["medusa", "eagle", "eagle"]
    table = json.loads((only_bench(tmp_path).path / "table.json").read_text())
    assert [row["family"] for row in table["families"]] == ["medusa", "eagle"]
    assert "going on with" in capsys.readouterr().out


def test_one_familys_failure_leaves_the_others_and_is_tried_again(
    bench, tmp_path, monkeypatch, capsys
):
    train = bench_families.train_drafter

    def fail(run, settings, *rest, **named):
        if settings.drafter.kind == "medusa":
            raise RuntimeError("no such kernel")
        return train(run, settings, *rest, **named)

    monkeypatch.setattr(bench_families, "train_drafter", fail)
    assert bench(*UNTIMED, "families=[medusa,mtp]") == 1
    said = capsys.readouterr()
    assert "1 of 2 families failed (medusa: no such kernel)" in said.err
    run = only_bench(tmp_path)
    table = json.loads((run.path / "table.json").read_text())
    assert [row["family"] for row in table["families"]] == ["mtp"]
    assert table["pending"] == ["medusa"]
    monkeypatch.setattr(bench_families, "train_drafter", train)
    assert bench(*UNTIMED, "families=[medusa,mtp]") == 0
    assert only_bench(tmp_path).is_finished


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_family_trains_and_decodes_without_a_defect(bench, tmp_path):
    assert bench() == 0
    table = json.loads((only_bench(tmp_path).path / "table.json").read_text())
    assert len(table["families"]) >= 9
    assert all(row["num_defects"] == 0 for row in table["families"])
    for folder in (only_bench(tmp_path).path / "families").iterdir():
        assert read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("minutes=0", "minutes=0: expected training minutes a family"),
        ("fresh=yes", "fresh=yes: expected true or false"),
        ("train.max_minutes=3", "pass minutes=3"),
        ("eagle.train.max_minutes=3", "pass minutes=3"),
        ("decode.batch_size=2", "decode.batch_size=2 has no effect on bench families; pass eval."),
        ("eagle.decode.max_new_tokens=2", "no effect on bench families; pass eval.max_new_tokens"),
        ("hardware=ddp", "families are compared in one process"),
    ],
)
def test_words_that_cannot_take_effect_are_refused(bench, tmp_path, word, message, capsys):
    words = [word, *(["hardware.num_processes=2"] if word == "hardware=ddp" else [])]
    assert bench("families=[eagle]", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()
