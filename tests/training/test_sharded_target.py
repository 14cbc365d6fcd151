"""A target whose layers are cut over processes: the same numbers, and no process left waiting.

The weights a pass puts together are the same bits, so what the target says is compared exactly.
Losses are float64 sums over another order of rows: equal to 1e-9 of themselves.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from target_worker import FLAVOURS, probe_of, tiny_settings
from toy_training import run_training
from training_worker import UNEVEN_ANSWERS, world_training
from worlds import run_world

from draftlab.errors import ConfigError
from draftlab.targets.load import load_target
from draftlab.targets.sharding import whole_tensor
from draftlab.targets.tiny import tiny_target

NAMES = sorted(FLAVOURS)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("cut")
    run_world("look", out, processes=2, worker="target_worker.py")
    return out


@pytest.fixture(scope="module")
def facts(two):
    return [json.loads((two / f"facts-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same training by one process with a whole target."""
    folder, target = tmp_path_factory.mktemp("whole"), tiny_target()
    _, _, numbers = run_training(
        folder,
        answers=UNEVEN_ANSWERS,
        target=target,
        train=world_training(1),
        on_checkpoint=probe_of(target),
    )
    return folder, numbers


def columns(path, key):
    lines = json.loads(path.read_text())
    return {step: numbers[key] for step, _, numbers in lines if key in numbers}


@pytest.mark.slow
def test_each_process_holds_half_of_the_layers(facts):
    for found in facts:
        assert found["held"] == found["whole"] // 2
        assert found["uncut"] == [
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
        ]


@pytest.mark.slow
def test_a_cut_target_is_the_same_target(facts):
    for found in facts:
        assert found["checksums"][0] == found["checksums"][1]
        assert found["heads"]
        assert len(found["states"]) == 4 * 9
        assert all(found["states"])


@pytest.mark.slow
def test_processes_with_batches_of_their_own_read_the_same_features(facts):
    assert [len(found["features"]) for found in facts] == [6, 2]
    assert all(all(found["features"]) for found in facts)


@pytest.mark.slow
def test_the_first_process_decodes_alone_and_the_others_only_help(facts):
    first, second = facts
    assert first["told"] == first["expected"]
    assert second["told"] == [None, None, None]


@pytest.mark.slow
def test_the_report_says_why_the_fused_pass_is_off(facts):
    report = facts[0]["report"]
    assert report["kernels"] == "reference"
    assert report["cut_over_processes"] == 2
    assert "cut over 2 processes" in report["fast_refusal"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_with_it_has_the_losses_and_probes_of_a_whole_target(two, alone, name):
    _, numbers = alone
    for key in ("train/loss", "train/grad_norm", "accept/told"):
        expected = numbers.column(key)
        assert len(expected) == (2 if key.startswith("accept") else 6)
        assert columns(two / f"{name}-0.json", key) == pytest.approx(expected, rel=1e-9)
    assert json.loads((two / f"{name}-1.json").read_text()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_with_it_ends_with_the_weights_of_a_whole_target(two, alone, name):
    folder, _ = alone
    expected = load_file(folder / "step-000006" / "drafter.safetensors")
    found = load_file(two / name / "step-000006" / "drafter.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_two_resume_and_one_process_with_a_whole_target_does_as_well(two, alone, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(two, out)
    run_world("resume", out, processes=2, worker="target_worker.py")
    expected = {step: x for step, x in alone[1].column("train/loss").items() if step > 3}
    for name in NAMES:
        assert columns(out / f"{name}-0.json", "train/loss") == pytest.approx(expected, rel=1e-9)
    folder = two / "target"
    _, _, numbers = run_training(
        folder,
        answers=UNEVEN_ANSWERS,
        train=world_training(1),
        on_checkpoint=probe_of(tiny_target()),
        resume_from=folder / "step-000003",
    )
    assert numbers.column("train/loss") == pytest.approx(expected, rel=1e-9)


def test_one_process_has_no_target_to_cut():
    with pytest.raises(ConfigError, match=r"there is one; pass hardware\.shard=none"):
        load_target(tiny_settings(), is_sharded=True)


def test_a_whole_target_leaves_the_other_processes_alone():
    target = tiny_target()
    assert target.run_on_first(lambda: 3, is_first=True) == 3
    assert target.run_on_first(lambda: 3, is_first=False) is None
    target.skip_pass()
    weight = target.model.get_parameter("lm_head.weight")
    assert whole_tensor(weight) is weight
