"""Where evaluations and audits go, and that none takes the place of another."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from draftlab.cli import keeping
from draftlab.cli.drafters import compose_for_drafters
from draftlab.cli.main import main
from draftlab.cli.reporting import find_evaluation, list_evaluations, write_report
from draftlab.cli.schema import EvalCommandSettings, parse_drafter, settings_of
from draftlab.drafters.store import build_drafter, save_drafter
from draftlab.runs.metrics_log import MetricsLog
from draftlab.runs.run_dir import RunDir, list_runs
from draftlab.settings.compose import compose
from draftlab.targets.tiny import tiny_target

FEW = (
    "eval=smoke",
    "eval.speed_prompts_per_domain=0",
    "eval.audit=false",
    "eval.max_new_tokens=4",
    "decode.num_draft_tokens=2",
    "hardware.threads=1",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a drafter of the tiny target."""
    data = compose("train", ["target.kernels=reference", "target.dtype=float32"]).data
    run = RunDir(tmp_path_factory.mktemp("made") / "adhoc" / "one")
    run.write_config({"target": data["target"], "hardware": data["hardware"]})
    target = tiny_target(dtype=torch.float32)
    drafter = build_drafter(parse_drafter(data["drafter"]), target.view)
    save_drafter(drafter, run.checkpoint_path(1), extra={})
    run.point("best", 1)
    return run


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of that run at outputs/adhoc/one; reports are written without their plots."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained.path, tmp_path / "outputs" / "adhoc" / "one")
    for plot in ("tau_by_domain", "alpha_by_depth", "emitted_histogram", "step_time", "training"):
        monkeypatch.setattr(f"draftlab.reports.html.plot_{plot}", lambda given: "")
    return RunDir(tmp_path / "outputs" / "adhoc" / "one")


def provenance_of(run, suite):
    return json.loads((run.eval_path(suite) / "provenance.json").read_text())


def summary_of(run, suite):
    return json.loads((run.eval_path(suite) / "summary.json").read_text())


def subtitle(folder):
    return (folder / "report.md").read_text().splitlines()[2]


def own_runs(outputs, name):
    return [run for run in list_runs(outputs) if run.path.parent.name == name]


def test_an_evaluation_with_another_k_leaves_the_earlier_one_as_it_is(run, capsys):
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    before = summary_of(run, "smoke")
    assert main(["eval", f"drafter={run.path}", *FEW, "decode.num_draft_tokens=1"]) == 0
    assert "this evaluation is smoke-2" in capsys.readouterr().out
    assert summary_of(run, "smoke") == before
    assert summary_of(run, "smoke-2")["arms"][0]["num_draft_tokens"] == 1
    assert summary_of(run, "smoke-2")["suite"] == "smoke-2"


def test_a_shorter_evaluation_does_not_take_the_place_of_the_fuller_report(run, capsys):
    longer = ["eval.suite=longer", "eval.max_new_tokens=6"]
    assert main(["eval", f"drafters=[ngram,{run.path}]", *FEW, *longer]) == 0
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    said = capsys.readouterr().out
    assert f"report {run.eval_path('smoke') / 'report.html'}" in said
    assert "suite longer" in subtitle(run.path)
    assert "suite longer" in subtitle(run.eval_path("longer"))
    assert "suite smoke" in subtitle(run.eval_path("smoke"))
    assert "also measured: smoke" in run.report_md_path.read_text()

    assert main(["report", str(run.path), "suite=smoke"]) == 0
    assert "suite=NAME shows another: longer" in capsys.readouterr().out
    assert "suite smoke" in subtitle(run.path)
    assert main(["report", str(run.path)]) == 0
    assert "suite longer" in subtitle(run.path)
    assert main(["report", str(run.path), "suite=domains"]) == 2
    assert "no evaluation of suite 'domains'; it has longer, smoke" in capsys.readouterr().err


def test_of_equally_full_evaluations_more_drafters_and_then_the_newest_come_first(run):
    assert main(["eval", f"drafters=[ngram,{run.path}]", *FEW]) == 0
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    assert list_evaluations(run) == ["smoke", "smoke-3", "smoke-2"]
    assert find_evaluation(run).result.suite == "smoke"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 0}', "has format 0; this version reads 1"),
        ('{"format": 1, "sui', "Unterminated string"),
        ("", "Expecting value"),
    ],
)
def test_an_evaluation_that_cannot_be_read_is_left_out_and_named(run, caplog, capsys, text, said):
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    bad = run.eval_path("old") / "summary.json"
    bad.parent.mkdir()
    bad.write_text(text)
    for words in (["report", run.path, "suite=smoke"], ["report", run.path]):
        caplog.clear()
        assert main([str(word) for word in words]) == 0
        (warned,) = (r.getMessage() for r in caplog.records if "left out" in r.getMessage())
        assert str(bad) in warned
        assert said in warned
    assert main(["compare", str(run.path), str(run.path), "suite=smoke"]) == 0
    assert main(["report", str(run.path), "suite=old"]) == 2
    assert f"cannot read evaluation {bad}: " in capsys.readouterr().err
    (run.eval_path("smoke") / "summary.json").unlink()
    assert main(["report", str(run.path)]) == 2
    assert str(bad) in capsys.readouterr().err


def test_conditions_that_lack_what_ranks_evaluations_are_no_traceback(run, caplog):
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    shutil.copytree(run.eval_path("smoke"), run.eval_path("edited"))
    data = summary_of(run, "edited")
    del data["conditions"]["comparable"]["domains"]
    (run.eval_path("edited") / "summary.json").write_text(json.dumps(data))
    assert list_evaluations(run) == ["smoke"]
    assert "KeyError: 'domains'" in caplog.text


def test_a_defect_is_told_whatever_lies_beside_the_evaluation(run, monkeypatch, caplog, capsys):
    """The fullest evaluation is damaged in a file that only its report reads."""
    assert main(["eval", f"drafters=[ngram,{run.path}]", *FEW]) == 0
    (run.eval_path("smoke") / "generations.jsonl").unlink()
    (run.eval_path("old")).mkdir()
    (run.eval_path("old") / "summary.json").write_text('{"format": 0}')
    from draftlab.evaluation import suite

    real = suite.audit
    monkeypatch.setattr(
        suite, "audit", lambda *args, **rest: replace(real(*args, **rest), num_defects=1)
    )
    words = ["eval=smoke", "eval.suite=quick", "eval.max_new_tokens=2", "hardware.threads=1"]
    words += ["eval.speed_prompts_per_domain=1", "eval.speed_max_new_tokens=2"]
    words += ["decode.num_draft_tokens=2"]
    assert main(["eval", f"drafter={run.path}", *words]) == 3
    assert "the audit found 1 defects" in capsys.readouterr().err
    assert "stays as it is" in caplog.text


def test_the_report_names_the_checkpoint_that_was_measured_not_the_best(run):
    shutil.copytree(run.checkpoint_path(1), run.checkpoint_path(2))
    run.point("best", 2)
    log = MetricsLog(run.metrics_path)
    log.log(2, "train", loss=1.0)
    log.close()
    assert main(["eval", f"drafter={run.checkpoint_path(1)}", *FEW]) == 0
    assert summary_of(run, "smoke")["arms"][0]["folder"] == str(run.checkpoint_path(1).resolve())
    text = run.report_md_path.read_text()
    assert "step 1 " in text
    assert "step 2 " not in text
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    assert "step 2 " in (run.eval_path("smoke-2") / "report.md").read_text()


def test_a_stage_that_is_still_to_come_is_named_in_the_runs_report(run):
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    write_report(run, find_evaluation(run).result, pending=("eagle3",))
    assert "eagle3: still to be trained or measured" in run.report_md_path.read_text()


def test_another_target_is_measured_in_a_run_of_its_own(run, tmp_path, capsys):
    assert main(["eval", f"drafter={run.path}", *FEW, "target.seed=7"]) == 0
    assert "is of another target (target.seed: 0 there, 7 here)" in capsys.readouterr().out
    assert not (run.path / "eval").exists()
    assert not run.report_html_path.exists()
    (own,) = own_runs(tmp_path / "outputs", "eval")
    assert own.is_finished
    assert own.report_md_path.is_file()
    assert not own.is_running


def evaluate(monkeypatch, run, *more):
    """Evaluate as the program of that name would, wherever it lies."""
    words = ["eval", f"drafter={run.path}", *FEW, *more]
    monkeypatch.setattr(sys, "argv", ["/opt/My Tools/draftlab", *words])
    assert main(words) == 0


def test_every_evaluation_says_which_command_made_it_with_which_versions(run, monkeypatch):
    evaluate(monkeypatch, run, "eval.seed=5")
    evaluate(monkeypatch, run, "decode.num_draft_tokens=1")
    first, second = provenance_of(run, "smoke"), provenance_of(run, "smoke-2")
    assert first["command"].endswith("eval.seed=5")
    assert second["command"].endswith("decode.num_draft_tokens=1")
    assert (first["seed"], second["seed"]) == (5, 0)
    assert first["versions"]["torch"]
    assert first["versions"]["transformers"]
    assert first["machine"]["torch_threads"] == 1
    shown = (run.eval_path("smoke-2") / "report.md").read_text().replace("\\", "")
    assert f"- command: draftlab eval drafter={run.path} eval=smoke" in shown
    assert f"- begun: {second['time']}" in shown
    assert "My Tools" not in shown


def test_the_report_of_an_older_evaluation_names_no_command(run, capsys):
    assert main(["eval", f"drafter={run.path}", *FEW]) == 0
    (run.eval_path("smoke") / "provenance.json").unlink()
    assert main(["report", str(run.path)]) == 0
    assert "- command" not in run.report_md_path.read_text()


def test_the_command_is_noted_before_the_work_and_a_later_stage_leaves_it(run, monkeypatch):
    folder = run.eval_path("smoke")
    for stage, goes_on in (("one", False), ("two", True)):
        monkeypatch.setattr(sys, "argv", ["draftlab", stage])
        with keeping.note_provenance(folder, seed=0, goes_on=goes_on):
            assert provenance_of(run, "smoke")["command"] == "draftlab one"
            (folder / "summary.json").write_text("{}")
        assert provenance_of(run, "smoke")["command"] == "draftlab one"


def test_a_folder_that_is_measured_anew_keeps_its_command_until_the_results_are_there(
    run, monkeypatch
):
    def measure(stage, works):
        monkeypatch.setattr(sys, "argv", ["draftlab", stage])
        with keeping.note_provenance(run.eval_path("smoke"), seed=0, goes_on=False):
            if not works:
                raise MemoryError
            (run.eval_path("smoke") / "summary.json").write_text("{}")

    measure("one", works=True)
    with pytest.raises(MemoryError):
        measure("two", works=False)
    assert provenance_of(run, "smoke")["command"] == "draftlab one"
    measure("three", works=True)
    assert provenance_of(run, "smoke")["command"] == "draftlab three"


def test_an_evaluation_that_was_stopped_takes_no_name(run, monkeypatch):
    def stop(*rest, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("draftlab.cli.measure.evaluate", stop)
        assert main(["eval", f"drafter={run.path}", *FEW]) == 130
    assert provenance_of(run, "smoke")["time"]
    assert keeping.free_suite(run, "smoke") == "smoke"
    evaluate(monkeypatch, run)
    assert keeping.free_suite(run, "smoke") == "smoke-2"
    assert provenance_of(run, "smoke")["command"].endswith("hardware.threads=1")


def home_of(run, *words):
    words = [f"drafter={run.path}", *words]
    settings = settings_of(EvalCommandSettings, compose_for_drafters("eval", words))
    return keeping.find_home([settings.drafter], settings, words)


@pytest.mark.parametrize(
    ("words", "is_home"),
    [
        ([], True),
        (["target.dtype=bfloat16"], True),
        (["target.family=gpt2"], False),
        (["target=demo"], False),
        (["paths.outputs=outputs"], True),
        (["paths.outputs=elsewhere"], False),
    ],
)
def test_the_drafters_run_is_the_place_unless_target_or_folder_is_another(run, words, is_home):
    assert home_of(run, *words) == (run if is_home else None)


def test_a_folder_that_was_typed_is_where_the_run_is_made(run, tmp_path):
    other = tmp_path / "elsewhere"
    assert main(["eval", f"drafter={run.path}", *FEW, f"paths.outputs={other}"]) == 0
    assert len(own_runs(other, "eval")) == 1
    assert not (run.path / "eval").exists()


def test_a_run_that_is_being_written_is_refused_before_a_target_is_loaded(run, monkeypatch, capsys):
    def load(settings):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("draftlab.targets.load.load_target", load)
    with run.hold():
        assert main(["eval", f"drafter={run.path}", *FEW]) == 2
    assert "being written by another process" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_an_evaluation_that_ends_before_its_result_leaves_no_run(
    tmp_path, monkeypatch, capsys, stop
):
    def measure(*rest, **named):
        raise stop("")

    monkeypatch.setattr("draftlab.cli.measure.measure_drafters", measure)
    words = ["drafter=ngram", *FEW, "target.kernels=reference", f"paths.outputs={tmp_path}"]
    assert main(["eval", *words]) == (130 if stop is KeyboardInterrupt else 1)
    assert list_runs(tmp_path) == []
    assert not list((tmp_path / "eval").iterdir())
    if stop is KeyboardInterrupt:
        assert "to start again: draftlab eval drafter=ngram" in capsys.readouterr().err


def test_what_was_measured_in_a_run_of_its_own_is_listed_as_done(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "draftlab.reports.html.write_report", lambda folder, given, **_: (folder, folder)
    )
    words = ["drafter=ngram", *FEW, "target.kernels=reference", f"paths.outputs={tmp_path}"]
    assert main(["eval", *words]) == 0
    capsys.readouterr()
    assert main(["runs", f"paths.outputs={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "done"


@pytest.mark.parametrize(
    "command", [["eval"], ["audit"], ["skips"], ["generate", "prompt=Hi"]], ids="-".join
)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decode.temperature=-1"], "temperature=-1"),
        (["decode.top_p=0.5", "decode.temperature=0"], "cannot take effect at temperature 0"),
        (
            ["decode=sampled", "decode.rule=typical"],
            "decode.rule=typical with decode.lossy=false",
        ),
        (["decode=sampled", "decode.rule=exact_match"], "exact_match is for temperature 0"),
        (["decode=sampled", "decode.lossy=true"], "with decode.lossy=true"),
    ],
)
def test_a_law_or_rule_that_cannot_work_is_refused_before_a_target_is_loaded(
    tmp_path, monkeypatch, capsys, command, words, message
):
    def load(settings):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("draftlab.targets.load.load_target", load)
    assert main([*command, *words, f"paths.outputs={tmp_path / 'out'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_bench_of_a_law_that_is_none_is_refused_before_a_target_is_loaded(monkeypatch, capsys):
    def load(settings):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("draftlab.targets.load.load_target", load)
    assert main(["bench", "decode", "decode.top_p=0.5"]) == 2
    assert "cannot take effect at temperature 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ("auto", []),
        ("block", []),
        ("without_replacement", []),
        ("point_mass", []),
        ("sampled_verify", []),
        ("typical", ["decode.lossy=true", "decode.lossy_epsilon=0.09", "decode.lossy_delta=0.3"]),
        ("threshold", ["decode.lossy=true", "decode.lossy_threshold=0.3"]),
    ],
)
def test_every_rule_passes_that_some_drafter_can_be_judged_by(rule, more):
    from draftlab.cli.measure import require_decoding

    composed = compose("eval", ["decode=sampled", f"decode.rule={rule}", *more])
    require_decoding(settings_of(EvalCommandSettings, composed).decode)


def test_an_empty_list_of_drafters_is_refused(tmp_path, capsys):
    assert main(["eval", "drafters=[]", f"paths.outputs={tmp_path / 'out'}"]) == 2
    assert "drafters=[]: names no drafter" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
