"""`draftlab skips`: the table, the drafter it leaves, and going on after an interruption."""

import json

import pytest

from draftlab.cli import skips
from draftlab.cli.main import main
from draftlab.drafters.store import read_card
from draftlab.runs.run_dir import list_runs


@pytest.fixture
def words(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"Count to {n}."}]} for n in range(8)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        "target=tiny",
        f"paths.outputs={tmp_path}",
        f"eval.prompts={prompts}",
        "tokens=8",
        "prompts=1",
    ]


def the_run(tmp_path):
    (run,) = [run for run in list_runs(tmp_path) if run.path.parent.name == "skips"]
    return run


def trials_of(run):
    return json.loads((run.path / "search.json").read_text())["trials"]


def test_a_search_prints_its_table_and_leaves_the_best_choice_as_a_drafter(words, tmp_path, capsys):
    assert main(["skips", *words, "trials=3", "drafter.num_draft_tokens=2"]) == 0
    out = capsys.readouterr().out
    assert "plain decoding" in out
    assert "3 choices measured" in out
    run = the_run(tmp_path)
    assert len(trials_of(run)) == 3
    card = read_card(run.pointed("best"))
    fastest = max(trials_of(run), key=lambda trial: trial["tau"] / trial["step_s"])
    assert list(card.settings.skip_layers) == fastest["skip_layers"]
    assert card.settings.num_draft_tokens == 2
    assert f"drafter={run.path}" in out


def test_an_interrupted_search_says_how_to_go_on_and_measures_only_the_rest(
    words, tmp_path, capsys, monkeypatch
):
    real, count = skips._State.add, 0

    def add_two_and_stop(state, trial):
        nonlocal count
        count += 1
        real(state, trial)
        if count == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(skips._State, "add", add_two_and_stop)
    assert main(["skips", *words, "trials=4"]) == 130
    run = the_run(tmp_path)
    assert f"to go on: draftlab skips resume={run.path} trials=4" in capsys.readouterr().err
    before = trials_of(run)
    monkeypatch.setattr(skips._State, "add", real)
    assert main(["skips", f"resume={run.path}", "trials=4"]) == 0
    assert trials_of(run)[:2] == before
    assert len(trials_of(run)) == 4


def test_a_search_interrupted_before_its_first_trial_leaves_no_run(
    words, tmp_path, capsys, monkeypatch
):
    def stop(state, trial):
        raise KeyboardInterrupt

    monkeypatch.setattr(skips._State, "add", stop)
    assert main(["skips", *words, "trials=4"]) == 130
    assert "to start again: draftlab skips target=tiny" in capsys.readouterr().err
    assert list_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["trials=none"], "trials=none: expected a whole number from 1"),
        (
            ["decode.max_new_tokens=3"],
            "decode.max_new_tokens=3 has no effect on skips; pass tokens=",
        ),
        (["decode.batch_size=3"], "no effect on skips; pass prompts="),
        (["drafter=ngram"], "searches for drafter=self_speculative"),
        (["resume=no/such/run"], "no run no/such/run"),
    ],
)
def test_words_that_cannot_work_are_refused(tmp_path, capsys, extra, message):
    assert main(["skips", *extra]) == 2
    assert message in capsys.readouterr().err


def test_a_resumed_search_keeps_its_own_settings(words, tmp_path, capsys):
    assert main(["skips", *words, "trials=1"]) == 0
    run = the_run(tmp_path)
    for word in ("decode=sampled", "tokens=64", "prompts=9"):
        assert main(["skips", f"resume={run.path}", word]) == 2
        said = capsys.readouterr().err
        assert f"{word} has no effect with resume=" in said
        assert "only trials= may change" in said
    (run.path / "search.json").write_text("{")
    assert main(["skips", f"resume={run.path}"]) == 2
    assert "start a new search" in capsys.readouterr().err
