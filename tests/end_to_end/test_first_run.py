"""The first thing a reader tries, and all that the help says to do next."""

import json
import time

import pytest
from command_line import only_run, run
from safetensors import safe_open

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def first(folder):
    """`draftlab train` in an empty folder: what it said, and its seconds."""
    assert not list(folder.iterdir())
    began = time.monotonic()
    said = run(folder, "train")
    return said, time.monotonic() - began


@pytest.fixture(scope="module")
def trained(folder, first):
    return only_run(folder / "outputs" / "adhoc")


@pytest.fixture(scope="module")
def evaluated(folder, trained):
    name = str(trained.path.relative_to(folder))
    return run(folder, "eval", f"drafters=[ngram,{name}]", "eval=smoke")


def test_training_needs_no_argument_and_less_than_a_minute(folder, first, trained):
    said, seconds = first
    assert seconds < 50
    assert trained.is_finished
    assert (trained.pointed("best") / "drafter.safetensors").is_file()
    assert f"next: draftlab eval drafter={trained.path.relative_to(folder)}" in said


def test_it_can_be_measured_beside_a_drafter_that_needs_no_training(trained, evaluated):
    summary = json.loads((trained.eval_path("smoke") / "summary.json").read_text())
    assert {arm["name"] for arm in summary["arms"]} >= {"ngram", "medusa"}
    assert trained.report_html_path.name in evaluated
    assert trained.report_md_path.is_file()


def test_it_answers(folder, trained):
    said = run(folder, "generate", f"drafter={trained.path}", "prompt=What's 2+2?")
    assert "draft tokens accepted" in said


def test_the_report_can_be_written_again(folder, trained, evaluated):
    page = trained.report_html_path.read_text()
    trained.report_html_path.unlink()
    run(folder, "report", str(trained.path))
    assert trained.report_html_path.read_text() == page


def test_two_runs_are_set_side_by_side(folder, trained, evaluated):
    said = run(folder, "compare", str(trained.path), str(trained.path))
    assert "medusa" in said


def test_it_is_exported_for_a_server(folder, trained):
    run(folder, "export", f"drafter={trained.path}", "export=vllm")
    exported = trained.export_path("vllm")
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "medusa"
    (weights,) = exported.glob("*.safetensors")
    with safe_open(weights, framework="pt") as file:
        assert list(file.keys())
    assert "vllm serve" in (exported / "README.md").read_text()
