import pytest

from draftlab.cli.drafters import compose_for_drafters, find_owning_run
from draftlab.errors import ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.settings.compose import compose


@pytest.fixture
def run(tmp_path):
    """A run of two processes, with a target whose nulls differ from what presets say."""
    run = RunDir(tmp_path / "My Run, (1)")
    data = compose("train", ["target=tiny", "target.seed=7"]).data
    hardware = {"kind": "ddp", "num_processes": 4, "threads": 2, "shard": "drafter"}
    run.write_config({"target": {**data["target"], "name": None}, "hardware": hardware})
    run.checkpoint_path(3).mkdir(parents=True)
    (run.checkpoint_path(3) / "drafter.json").write_text("{}")
    run.point("latest", 3)
    return run


def test_the_target_of_the_run_is_taken_as_it_was_saved(run):
    data = compose_for_drafters("generate", [f"drafter={run.path}"]).data
    assert data["target"] == run.read_config()["target"]


def test_a_checkpoint_belongs_to_its_run(run):
    data = compose_for_drafters("eval", [f'drafters=[ngram,"{run.checkpoint_path(3)}"]']).data
    assert data["target"]["seed"] == "7"
    found = find_owning_run(str(run.checkpoint_path(3)))
    assert found is not None
    assert found.path == run.path


def test_a_typed_key_beats_the_run_and_a_typed_target_replaces_it(run):
    words = [f"drafter={run.path}", "target.dtype=float64"]
    target = compose_for_drafters("generate", words).data["target"]
    assert (target["dtype"], target["seed"]) == ("float64", "7")
    target = compose_for_drafters("generate", [f"drafter={run.path}", "target=demo"]).data["target"]
    assert (target["source"], target["seed"]) == ("demo", 0)


def test_one_process_takes_over_from_several(run):
    data = compose_for_drafters("generate", [f"drafter={run.path}"]).data
    alone = {"num_processes": 1, "threads": None, "shard": "none", "accelerate_config": None}
    assert data["hardware"] == {"kind": "single_gpu", **alone}
    data = compose_for_drafters("generate", [f"drafter={run.path}", "hardware=cpu"]).data
    assert data["hardware"]["kind"] == "cpu"


def test_a_kind_and_a_hub_id_leave_the_words_alone():
    for name in ("ngram", "someone/eagle3-head"):
        data = compose_for_drafters("generate", [f"drafter={name}"]).data
        assert data["target"] == compose("generate", []).data["target"]


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="no drafter"):
        compose_for_drafters("eval", [f"drafters=[ngram,{tmp_path}/no/such]"])
