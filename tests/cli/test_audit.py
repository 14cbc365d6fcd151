"""`draftlab audit`: what it prints, what it leaves, and how it ends."""

import json

import pytest

from draftlab.cli.main import main
from draftlab.runs.run_dir import list_runs


@pytest.fixture
def words(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"{n} and {n}"}]} for n in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        "target=tiny",
        f"paths.outputs={tmp_path}",
        f"eval.prompts={prompts}",
        "audit.prompts=2",
        "audit.max_new_tokens=8",
        "audit.sampled_tokens=4",
        "audit.samples=16",
    ]


def record(tmp_path):
    (run,) = [run for run in list_runs(tmp_path) if run.path.parent.name == "audit"]
    return json.loads((run.path / "audit.json").read_text())


def test_an_exact_drafter_passes_and_leaves_its_record(words, tmp_path, capsys):
    assert main(["audit", "drafter=ngram", *words]) == 0
    out = capsys.readouterr().out
    assert "PASSED" in out
    assert "forks per 1,000 tokens" in out
    found = record(tmp_path)
    assert found["passes"] is True
    assert found["drafter"] == "ngram"
    assert found["conditions"]["decode"]["temperature"] == 1.0
    assert found["provenance"]["command"]
    assert found["provenance"]["versions"]["torch"]


def test_a_lossy_rule_ends_with_exit_code_3(words, tmp_path, capsys):
    rule = ["decode.rule=threshold", "decode.lossy=true", "decode.lossy_threshold=0.3"]
    assert main(["audit", "drafter=ngram", *words, *rule]) == 3
    told = capsys.readouterr()
    assert "FAILED" in told.err
    assert "LOSSY" in told.err
    assert "audit.json" in told.err
    assert record(tmp_path)["sampled"]["is_lossy"] is True


def test_greedy_alone_leaves_the_sampled_part_out(words, tmp_path, capsys):
    assert main(["audit", "drafter=ngram", "decode=greedy", *words]) == 0
    assert "not audited: decode.temperature is 0" in capsys.readouterr().out
    assert record(tmp_path)["sampled"] is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["drafter=medusa"], "a kind that has to be trained"),
        (["audit.batch_size=1"], "audit.batch_size"),
        (["decode.max_new_tokens=3"], "no effect on audit; pass audit.max_new_tokens"),
        (["decode.rule=exact_match"], "exact_match is for temperature 0"),
    ],
)
def test_words_that_cannot_work_are_refused(words, capsys, extra, message):
    chosen = ["drafter=ngram"] if not extra[0].startswith("drafter=") else []
    assert main(["audit", *chosen, *words, *extra]) == 2
    assert message in capsys.readouterr().err


def test_help_tells_the_exit_code_and_the_budget(capsys):
    assert main(["audit", "--help"]) == 0
    out = capsys.readouterr().out
    assert "exit code 3" in out
    assert "audit.minutes" in out
