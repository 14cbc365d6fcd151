import json
import shutil
import subprocess
import sys

import pytest

from draftlab.cli import launch, train_job
from draftlab.cli.drafters import find_drafter_folder
from draftlab.cli.launch import launch_training, prepare_run
from draftlab.errors import CheckpointError, ConfigError, DraftlabError
from draftlab.runs.run_dir import list_runs, open_run


@pytest.fixture
def outputs(tmp_path):
    return tmp_path / "My Runs (1)"


@pytest.fixture
def trained(monkeypatch):
    """Runs whose training was asked for; nothing is trained."""
    runs = []
    monkeypatch.setattr(
        train_job, "run_training", lambda run, settings: runs.append((run, settings))
    )
    return runs


def words(outputs, *more):
    return ["drafter=medusa", f"paths.outputs={outputs}", *more]


def test_a_drafter_without_weights_is_refused_before_there_is_a_folder(outputs):
    with pytest.raises(ConfigError, match=r"drafter=ngram has no weights.*draftlab eval"):
        prepare_run(words(outputs, "drafter=ngram"))
    assert not outputs.exists()


def test_a_run_has_its_settings_and_its_origin_before_it_starts(outputs):
    run, settings = prepare_run(words(outputs, "seed=3"))
    assert run.path.parent == outputs / "adhoc"
    assert run.read_config() == settings.model_dump(mode="json")
    assert run.read_config()["hardware"]["threads"] >= 1
    provenance = json.loads(run.provenance_path.read_text())
    assert provenance["seed"] == 3
    assert provenance["versions"]["torch"]


def test_a_recipe_names_the_folder(outputs, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# @package _global_\nseed: 1\n")
    run, _ = prepare_run(words(outputs, f"recipe={path}"))
    assert run.path.parent == outputs / "mine"


def test_the_worker_gets_the_settings_of_the_folder(outputs, trained):
    run = launch_training(words(outputs, "seed=5"))
    assert [(r.path, s.seed) for r, s in trained] == [(run.path, 5)]
    assert run.is_finished
    assert not run.is_running


def test_the_same_words_go_on_with_a_run_that_stopped(outputs, trained, monkeypatch):
    def die(run, settings):
        raise MemoryError

    monkeypatch.setattr(train_job, "run_training", die)
    with pytest.raises(MemoryError):
        launch_training(words(outputs))
    monkeypatch.setattr(train_job, "run_training", lambda run, settings: trained.append(run))
    run = launch_training(words(outputs))
    assert [found.path for found in list_runs(outputs)] == [run.path]
    assert run.is_finished


def test_a_finished_a_running_and_another_run_are_not_gone_on_with(outputs, trained):
    finished = launch_training(words(outputs))
    running, _ = prepare_run(words(outputs))
    other, _ = prepare_run(words(outputs, "seed=1"))
    with running.hold():
        new, _ = prepare_run(words(outputs))
    fresh, _ = prepare_run(words(outputs, "resume=never"))
    assert len({r.path for r in (finished, running, other, new, fresh)}) == 5


def test_resume_takes_a_run_with_its_own_settings(outputs, trained):
    run, settings = prepare_run(words(outputs, "seed=9"))
    again, same = prepare_run([f"resume={run.path}"])
    assert (again, same) == (run, settings)
    with pytest.raises(ConfigError, match=r"drop seed=1.*pass init="):
        prepare_run([f"resume={run.path}", "seed=1"])
    with pytest.raises(CheckpointError, match="no run nowhere"):
        prepare_run(["resume=nowhere"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    words = ["train.max_steps=1", "hardware.threads=1", "data.validation_fraction=0"]
    return launch_training([*words, f"paths.outputs={tmp_path_factory.mktemp('finished')}"])


def copy_of(run, folder):
    return open_run(shutil.copytree(run.path, folder / "copy"))


def test_a_finished_run_is_done_while_its_drafter_is_there(finished, trained):
    assert launch_training([f"resume={finished.path}"]) == finished
    assert trained == []


def test_a_finished_run_without_its_checkpoints_is_not_called_done(finished, trained, tmp_path):
    run = copy_of(finished, tmp_path)
    shutil.rmtree(run.checkpoints_path)
    with pytest.raises(CheckpointError, match=r"is finished.*no checkpoint.*resume=never"):
        launch_training([f"resume={run.path}"])
    with pytest.raises(CheckpointError, match=r"checkpoints are gone; train it anew"):
        find_drafter_folder(str(run.path))
    assert trained == []


def test_a_finished_run_with_damaged_weights_is_not_called_done(finished, trained, tmp_path):
    run = copy_of(finished, tmp_path)
    weights = run.checkpoint_path(1) / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"is finished.*has sha256.*resume=never"):
        launch_training([f"resume={run.path}"])
    shutil.rmtree(weights.parent)
    with pytest.raises(CheckpointError, match=r"is finished.*names step-000001.*resume=never"):
        launch_training([f"resume={run.path}"])


def test_training_starts_from_a_kind_not_from_a_trained_drafter(outputs):
    with pytest.raises(ConfigError, match="pass init=a/b"):
        prepare_run([f"paths.outputs={outputs}", "drafter=a/b"])
    assert not outputs.exists()


def test_what_is_not_there_is_refused_before_a_folder_is_made(outputs, tmp_path):
    for more, message in (
        (["data=jsonl", f"data.paths={tmp_path}/no.jsonl"], r"no\.jsonl does not exist"),
        ([f"init={tmp_path}/no/drafter"], "no drafter"),
        ([f"init={tmp_path}"], r"expected drafter\.json"),
        (["init=ngram"], "ngram is a kind of drafter and has no trained weights to start from"),
        (["drafter=hybrid"], r"train that first.*drafter\.head=RUN"),
        (["resume=maybe"], r"resume=maybe: expected auto, never or a run's folder; no run maybe"),
    ):
        with pytest.raises(DraftlabError, match=message):
            prepare_run(words(outputs, *more))
    assert not outputs.exists()


def test_an_interrupt_says_which_run_goes_on(outputs, monkeypatch):
    def stop(run, settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_job, "run_training", stop)
    with pytest.raises(KeyboardInterrupt, match=r"draftlab train 'resume=.*My Runs"):
        launch_training(words(outputs))


def test_a_failed_worker_process_is_an_error_that_says_how_to_go_on(outputs, monkeypatch):
    done = subprocess.CompletedProcess([], returncode=7)
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(DraftlabError, match=r"exit code 7.*resume="):
        launch_training(words(outputs, "hardware.num_processes=2"))


@pytest.mark.slow
def test_two_processes_share_one_folder(outputs, tmp_path, monkeypatch):
    """Case O-37: each rank used to make a folder of its own."""
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import importlib.abc, importlib.machinery, os, sys, types\n"
        "module = types.ModuleType('draftlab.cli.train_job')\n"
        "def run_training(run, settings):\n"
        "    (run.path / ('rank' + os.environ['RANK'])).write_text(str(settings.seed))\n"
        "module.run_training = run_training\n"
        "sys.modules['draftlab.cli.train_job'] = module\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = launch_training(words(outputs, "hardware.num_processes=2", "seed=4"))
    assert [found.path for found in list_runs(outputs)] == [run.path]
    assert [(run.path / f"rank{rank}").read_text() for rank in (0, 1)] == ["4", "4"]
    assert open_run(run.path).is_finished


@pytest.mark.slow
def test_a_worker_started_by_hand_never_sees_hydra(outputs):
    run, _ = prepare_run(words(outputs))
    code = (
        "import sys, types\n"
        "job = types.ModuleType('draftlab.cli.train_job')\n"
        "job.run_training = lambda run, settings: None\n"
        "sys.modules['draftlab.cli.train_job'] = job\n"
        "from draftlab.cli.worker import main\n"
        f"assert main([{str(run.path)!r}]) == 0\n"
        "assert 'hydra' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MANY = ["hardware.num_processes=2", "hardware.accelerate_config=machines.yaml"]


@pytest.mark.parametrize("name", ["", "a/b", ".."])
def test_several_machines_must_be_told_which_run(outputs, monkeypatch, name):
    monkeypatch.setenv("DRAFTLAB_RUN_ID", name)
    with pytest.raises(ConfigError, match="set DRAFTLAB_RUN_ID to one word"):
        prepare_run(words(outputs, *MANY))


def test_a_launcher_file_that_is_not_there_is_named(outputs, monkeypatch):
    monkeypatch.setenv("DRAFTLAB_RUN_ID", "job-1")
    with pytest.raises(ConfigError, match=r"accelerate_config=machines\.yaml cannot be read"):
        prepare_run(words(outputs, *MANY))


def test_all_machines_find_the_run_that_the_first_one_made(outputs, monkeypatch):
    monkeypatch.setenv("DRAFTLAB_RUN_ID", "job-1")
    monkeypatch.setenv("DRAFTLAB_MACHINE_RANK", "0")
    first, settings = prepare_run(words(outputs, *MANY))
    monkeypatch.setenv("DRAFTLAB_MACHINE_RANK", "1")
    second, same = prepare_run(words(outputs, *MANY))
    assert first.path == second.path == outputs / "adhoc" / "job-1"
    assert settings == same
    with pytest.raises(ConfigError, match="begun with other settings"):
        prepare_run(words(outputs, *MANY, "seed=9"))


def test_a_first_machine_that_never_comes_is_not_waited_for_without_end(outputs, monkeypatch):
    monkeypatch.setenv("DRAFTLAB_RUN_ID", "job-1")
    monkeypatch.setenv("DRAFTLAB_MACHINE_RANK", "1")
    monkeypatch.setattr(launch, "_MEETING_S", 0)
    with pytest.raises(ConfigError, match="the first machine did not make"):
        prepare_run(words(outputs, *MANY))
