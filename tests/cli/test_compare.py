import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftlab.cli.main import main
from draftlab.runs.run_dir import list_runs


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Two equal evaluations, and one of shorter answers."""
    outputs = tmp_path_factory.mktemp("out")
    words = ["drafter=ngram", "eval=smoke", "eval.audit=false", "eval.speed_prompts_per_domain=0"]
    words += ["decode.num_draft_tokens=2", "target.kernels=reference", "hardware.threads=1"]
    words += ["eval.samples=true", f"paths.outputs={outputs}"]
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "draftlab.reports.html.write_report", lambda folder, given, **more: (folder, folder)
        )
        for more in ([], [], ["eval.max_new_tokens=8"]):
            assert main(["eval", *words, *more]) == 0
            known = {run.path for run in runs}
            runs += [run for run in list_runs(outputs) if run.path not in known]
    return [str(run.path) for run in runs]


def test_equal_conditions_give_a_paired_table(evaluated, capsys):
    assert main(["compare", *evaluated[:2], "suite=smoke"]) == 0
    printed = capsys.readouterr().out
    assert "ngram: tau" in printed
    assert "+0.0 %" in printed
    assert "prompts paired" in printed


def test_two_evaluations_of_one_run_are_paired_by_their_suites(evaluated, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(evaluated[0], run)
    shutil.copytree(run / "eval" / "smoke", run / "eval" / "smoke-2")
    summary = run / "eval" / "smoke-2" / "summary.json"
    summary.write_text(summary.read_text().replace('"suite": "smoke"', '"suite": "smoke-2"'))
    assert main(["compare", str(run), str(run), "suite=smoke,smoke-2"]) == 0
    assert "smoke-2 against smoke" in " ".join(capsys.readouterr().out.split())
    assert main(["compare", str(run), str(run), "suite=smoke,smoke-2,smoke-3"]) == 2
    assert "expected one suite, or two" in capsys.readouterr().err


def test_other_conditions_are_named_and_refused(evaluated, capsys):
    assert main(["compare", evaluated[0], evaluated[2]]) == 2
    said = capsys.readouterr().err
    assert "max_new_tokens: 16 against 8" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{0}"], "expected two runs, got 1"),
        (["{0}", "{0}", "{0}"], "this command takes at most 2"),
        (["{0}", "nowhere"], "no run nowhere"),
        (["{0}", "{1}", "suite=domains"], "no evaluation of suite 'domains'; it has smoke"),
        (["{0}", "{1}", "suit=smoke"], "known options: suite="),
    ],
)
def test_wrong_words_are_code_2(evaluated, words, message, capsys):
    assert main(["compare", *(word.format(*evaluated) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_reports_and_comparisons_need_no_torch(evaluated):
    code = (
        "import sys\n"
        "from draftlab.cli.main import main\n"
        f"assert main(['report', {evaluated[0]!r}]) == 0\n"
        f"assert main(['compare', {evaluated[0]!r}, {evaluated[1]!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_samples_that_were_asked_for_stand_in_the_report(evaluated):
    assert main(["report", evaluated[0]]) == 0
    text = (Path(evaluated[0]) / "report.md").read_text(encoding="utf-8")
    assert "> answer:" in text
