import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from toy_training import (
    Recorder,
    make_rows,
    optim_settings,
    run_training,
    toy_drafter,
    train_settings,
)

from draftlab.errors import CheckpointError, ConfigError, DraftlabError
from draftlab.targets.tiny import tiny_target

ANSWERS = [2, 40, 7, 19, 25, 3, 11, 30]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("averages_tokens", [False, True])
@pytest.mark.parametrize(("batch_rows", "accumulation"), [(4, 2), (1, 8)])
def test_the_step_does_not_depend_on_how_its_rows_are_batched(
    target, tmp_path, batch_rows, accumulation, averages_tokens
):
    # rows with nothing to learn, so that batches hold different numbers of sequences
    answers = [2, 40, 0, 19, 0, 0, 11, 30]
    trained = []
    for name, rows, slots in (("whole", 8, 1), ("cut", batch_rows, accumulation)):
        train = train_settings(max_steps=2, batch_rows=rows, accumulation=slots)
        drafter = toy_drafter(target, averages_tokens=averages_tokens)
        _, _, numbers = run_training(
            tmp_path / name, answers=answers, target=target, drafter=drafter, train=train
        )
        trained.append((drafter.state_dict(), numbers.column("train/loss")))
    (whole, whole_loss), (cut, cut_loss) = trained
    assert cut_loss == pytest.approx(whole_loss, rel=1e-9)
    for key in whole:
        assert torch.allclose(cut[key], whole[key], rtol=1e-8, atol=1e-12)


def test_every_sequence_weighs_the_same_however_short(target, tmp_path):
    # the gradient of the step is the mean of the gradients of its sequences
    alone = []
    for number, answer in enumerate([2, 40]):
        rows = make_rows(target, [2 if number == 0 else 0, 40 if number == 1 else 0])
        train = train_settings(max_steps=1, batch_rows=2)
        _, _, numbers = run_training(
            tmp_path / str(answer), answers=[], target=target, rows=rows, train=train
        )
        alone.append(numbers.column("train/loss")[1])
    rows = make_rows(target, [2, 40])
    train = train_settings(max_steps=1, batch_rows=2)
    _, _, numbers = run_training(
        tmp_path / "both", answers=[], target=target, rows=rows, train=train
    )
    assert numbers.column("train/loss")[1] == pytest.approx(sum(alone) / 2, rel=1e-9)


def test_a_mean_over_tokens_weighs_every_prediction_the_same(target, tmp_path):
    found = []
    for name, answers in (("short", [14, 0]), ("long", [0, 40]), ("both", [14, 40])):
        _, _, numbers = run_training(
            tmp_path / name,
            answers=[],
            target=target,
            drafter=toy_drafter(target, averages_tokens=True),
            rows=make_rows(target, answers),
            train=train_settings(max_steps=1, batch_rows=2),
        )
        found.append((numbers.column("train/loss")[1], sum(answers)))
    (short, few), (long, many), (both, all_of_them) = found
    assert few + many == all_of_them
    assert both == pytest.approx((few * short + many * long) / all_of_them, rel=1e-9)
    assert abs(both - (short + long) / 2) > 1e-4


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_learning_rate_follows_optimizer_steps(target, tmp_path, accumulation):
    _, _, numbers = run_training(
        tmp_path,
        answers=ANSWERS,
        target=target,
        optim=optim_settings(lr=0.001, warmup_fraction=0.1, min_lr_fraction=0.2),
        train=train_settings(max_steps=20, batch_rows=1, accumulation=accumulation),
    )
    rates = numbers.column("train/lr")
    assert rates[1] == pytest.approx(0.0005)
    assert rates[2] == max(rates.values()) == pytest.approx(0.001)
    assert rates[20] == pytest.approx(0.0002)


def test_the_target_stays_as_it_was(target, tmp_path):
    before = copy.deepcopy(target.model.state_dict())
    _, drafter, _ = run_training(tmp_path, answers=ANSWERS, target=target)
    after = target.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert not target.model.training
    assert not any(name.startswith("target") for name, _ in drafter.named_parameters())


def test_a_checkpoint_holds_the_drafters_tensors_and_nothing_of_the_target(target, tmp_path):
    result, drafter, _ = run_training(tmp_path, answers=ANSWERS, target=target)
    saved = load_file(result.latest / "drafter.safetensors")
    now = drafter.state_dict()
    assert saved.keys() == now.keys()
    assert all(torch.equal(saved[key], now[key]) for key in now)
    size = (result.latest / "drafter.safetensors").stat().st_size
    tensors = sum(t.numel() * t.element_size() for t in now.values())
    assert tensors < size < tensors + 4096


def test_the_last_step_is_saved_off_the_interval(target, tmp_path):
    train = train_settings(max_steps=7, save_every_steps=3, keep_checkpoints=9)
    result, _, _ = run_training(tmp_path, answers=ANSWERS, target=target, train=train)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-000003", "step-000006", "step-000007"]
    assert result.latest.name == "step-000007"


def test_the_best_checkpoint_has_the_highest_tau_and_survives_rotation(target, tmp_path):
    taus = {1: 1.2, 2: 1.9, 3: 1.4, 4: 1.8, 5: 1.3}
    seen = []

    def probe(step, drafter):
        seen.append((step, drafter.training))
        return {"tau": taus[step]}

    train = train_settings(max_steps=5, save_every_steps=1, keep_checkpoints=1)
    result, drafter, numbers = run_training(
        tmp_path, answers=ANSWERS, target=target, train=train, on_checkpoint=probe
    )
    assert (result.best.name, result.best_tau) == ("step-000002", 1.9)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000005"]
    assert seen == [(step, False) for step in taus]
    assert drafter.training
    assert numbers.column("accept/tau") == taus


def test_of_equal_probes_the_last_makes_the_best_checkpoint(target, tmp_path):
    train = train_settings(max_steps=3, save_every_steps=1)
    taus = {1: 1.0, 2: 1.0, 3: 0.9}
    result, _, _ = run_training(
        tmp_path,
        answers=ANSWERS,
        target=target,
        train=train,
        on_checkpoint=lambda step, _: {"tau": taus[step]},
    )
    assert (result.best.name, result.best_tau) == ("step-000002", 1.0)


def test_the_best_checkpoint_follows_tokens_per_s_where_that_is_asked(target, tmp_path):
    numbers = {1: (1.2, 30.0), 2: (1.9, 20.0), 3: (1.4, 25.0)}
    train = train_settings(max_steps=3, save_every_steps=1, best_by="tokens_per_s")
    result, _, _ = run_training(
        tmp_path,
        answers=ANSWERS,
        target=target,
        train=train,
        on_checkpoint=lambda step, _: dict(
            zip(("tau", "tokens_per_s"), numbers[step], strict=True)
        ),
    )
    assert (result.best.name, result.best_tau) == ("step-000001", 1.2)


def test_training_ends_when_patience_does_and_stays_ended(target, tmp_path):
    taus = {1: 1.2, 2: 1.1, 3: 1.3, 4: 1.3, 5: 1.2}
    seen = []

    def probe(step, drafter):
        seen.append(step)
        return {"tau": taus[step]}

    train = train_settings(max_steps=9, save_every_steps=1, patience=2)
    options = {"answers": ANSWERS, "target": target, "train": train, "on_checkpoint": probe}
    result, _, _ = run_training(tmp_path, **options)
    assert seen == [1, 2, 3, 4, 5]
    # an equal probe is the newer best and brings nothing better
    assert (result.total_steps, result.best.name) == (5, "step-000004")
    again, _, _ = run_training(tmp_path, resume_from=tmp_path, **options)
    assert (again.total_steps, again.best.name) == (5, "step-000004")
    assert seen == [1, 2, 3, 4, 5]


def test_patience_without_anything_to_probe_is_refused(target, tmp_path):
    with pytest.raises(ConfigError, match="nothing can be probed"):
        run_training(tmp_path, answers=ANSWERS, target=target, train=train_settings(patience=2))


def test_probes_keep_their_own_rhythm(target, tmp_path):
    seen = []
    train = train_settings(max_steps=7, save_every_steps=2, probe_every_steps=3, keep_checkpoints=9)
    run_training(
        tmp_path,
        answers=ANSWERS,
        target=target,
        train=train,
        on_checkpoint=lambda step, drafter: seen.append(step),
    )
    assert seen == [3, 6, 7]
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == [2, 3, 4, 6, 7]


def test_the_running_mean_is_what_is_probed_and_saved(target, tmp_path):
    probed = {}

    def probe(step, drafter):
        probed.update({key: value.clone() for key, value in drafter.state_dict().items()})

    result, drafter, _ = run_training(
        tmp_path,
        answers=ANSWERS,
        target=target,
        optim=optim_settings(ema_decay=0.5),
        on_checkpoint=probe,
    )
    saved = load_file(result.latest / "drafter.safetensors")
    state = load_file(result.latest / "state" / "tensors.safetensors")
    for key, value in drafter.state_dict().items():
        assert torch.equal(saved[key], probed[key])
        assert torch.equal(saved[key], state[f"mean/{key}"])
        assert torch.equal(value, state[f"weight/{key}"])
        assert not torch.equal(saved[key], value)


class Killed(Exception):
    pass


class Machine:
    """Turns the clock that a training sees, at a pace that hangs on the steps done; may kill it."""

    def __init__(self, monkeypatch, pace, *, done=0, kill_after=None):
        self.pace = pace
        self.done = done
        self.kill_after = kill_after
        self.now = 0.0
        self.recorder = Recorder()
        monkeypatch.setattr("draftlab.training.trainer.time.perf_counter", self.read)

    def read(self):
        self.now += self.pace(self.done)
        return self.now

    def log(self, step, split, **numbers):
        self.done = step
        self.recorder(step, split, **numbers)
        if step == self.kill_after:
            raise Killed

    def lr(self):
        return self.recorder.column("train/lr")


def train_by_clock(folder, target, machine, *, resume=False, **limits):
    given = {"max_steps": None, "max_minutes": 0.5, "save_every_steps": 7, "keep_checkpoints": 99}
    return run_training(
        folder,
        answers=ANSWERS,
        target=target,
        train=train_settings(**(given | limits)),
        optim=optim_settings(schedule="linear", ema_decay=0.9),
        metrics=machine.log,
        resume_from=folder if resume else None,
    )


def busy_at_first(done):
    return 1.0 if done < 12 else 0.5


def test_a_slow_start_does_not_shorten_a_training(target, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    result, _, _ = train_by_clock(tmp_path, target, Machine(monkeypatch, busy_at_first))
    plan = json.loads((tmp_path / "plan.json").read_text())
    (_, planned), *_ = plan["looks"]
    assert planned == 11  # 30 s - 4 rehearsals of 2 s by that clock, at 2 s
    assert result.total_steps == plan["total_steps"] == 12 + (30 - 8 - 12) * 2
    assert "planned were 11" in caplog.text


def test_a_training_with_a_time_limit_ends_alike_whenever_it_was_killed(
    target, tmp_path, monkeypatch
):
    machine = Machine(monkeypatch, busy_at_first)
    whole, drafter, _ = train_by_clock(tmp_path / "whole", target, machine)
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())
    looks = [step for step, _ in plan["looks"]]
    # before the first checkpoint, between looks, after looks that only plan.json knows, at the end
    for kill_after in (3, 10, looks[-1], whole.total_steps):
        folder = tmp_path / str(kill_after)
        with pytest.raises(Killed):
            train_by_clock(
                folder, target, Machine(monkeypatch, busy_at_first, kill_after=kill_after)
            )
        done = (kill_after - 1) // 7 * 7
        again = Machine(monkeypatch, busy_at_first, done=done)
        resumed, theirs, _ = train_by_clock(folder, target, again, resume=True)
        assert resumed.total_steps == whole.total_steps
        assert json.loads((folder / "plan.json").read_text()) == plan
        assert again.lr() == {step: lr for step, lr in machine.lr().items() if step > done}
        expected = drafter.state_dict()
        assert all(torch.equal(x, expected[key]) for key, x in theirs.state_dict().items())


def test_a_time_limit_holds_over_a_kill(target, tmp_path, monkeypatch):
    with pytest.raises(Killed):
        train_by_clock(tmp_path, target, Machine(monkeypatch, lambda done: 0.25, kill_after=80))
    slow = Machine(monkeypatch, lambda done: 1.0, done=77)
    result, _, _ = train_by_clock(tmp_path, target, slow, resume=True)
    spent = json.loads((result.latest / "state" / "state.json").read_text())["spent_s"]
    assert 29 <= spent <= 30
    assert 77 < result.total_steps < 90


def test_a_checkpoint_that_does_not_know_its_time_keeps_the_plan(
    target, tmp_path, monkeypatch, caplog
):
    machine = Machine(monkeypatch, busy_at_first)
    whole, _, _ = train_by_clock(tmp_path, target, machine)
    (tmp_path / "latest").write_text("step-000007")
    state = tmp_path / "step-000007" / "state" / "state.json"
    known = json.loads(state.read_text())
    older = {key: known[key] for key in known if key not in ("spent_s", "counted_s", "looks")}
    state.write_text(json.dumps(older))
    caplog.set_level("INFO")
    again = Machine(monkeypatch, lambda done: 9.0, done=7)
    resumed, _, _ = train_by_clock(tmp_path, target, again, resume=True)
    assert resumed.total_steps == whole.total_steps
    assert again.lr() == {step: lr for step, lr in machine.lr().items() if step > 7}
    assert f"going on to step {whole.total_steps} as planned" in caplog.text


def test_measuring_the_time_of_a_step_changes_nothing(target, tmp_path):
    timed = train_settings(max_steps=3, max_minutes=60)
    plain = train_settings(max_steps=3)
    results = []
    for name, train in (("timed", timed), ("plain", plain)):
        _, drafter, numbers = run_training(
            tmp_path / name,
            answers=ANSWERS,
            target=target,
            train=train,
            optim=optim_settings(kind="muon", adamw_lr=0.001),
        )
        results.append((drafter.state_dict(), numbers.column("train/loss")))
    assert results[0][1] == results[1][1]
    assert all(torch.equal(results[0][0][key], results[1][0][key]) for key in results[0][0])


def test_the_environment_does_not_change_the_gradient(target, tmp_path, monkeypatch):
    norms = []
    for accumulation in ("1", "8"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", accumulation)
        _, _, numbers = run_training(tmp_path / accumulation, answers=ANSWERS, target=target)
        norms.append(numbers.column("train/grad_norm"))
    assert norms[0] == norms[1]


def test_a_folder_with_a_training_is_not_overwritten(target, tmp_path):
    run_training(tmp_path, answers=ANSWERS, target=target)
    with pytest.raises(CheckpointError, match="already holds a training"):
        run_training(tmp_path, answers=ANSWERS, target=target)


def test_a_checkpoint_of_another_folder_is_not_resumed(target, tmp_path):
    result, _, _ = run_training(tmp_path / "a", answers=ANSWERS, target=target)
    with pytest.raises(CheckpointError, match=r"resumed in its own\s+folder"):
        run_training(tmp_path / "b", answers=ANSWERS, target=target, resume_from=result.latest)


def test_an_older_checkpoint_can_be_resumed_and_ends_alike(target, tmp_path):
    train = train_settings(max_steps=6, save_every_steps=2, keep_checkpoints=9)
    _, once, _ = run_training(tmp_path, answers=ANSWERS, target=target, train=train)
    _, again, numbers = run_training(
        tmp_path,
        answers=ANSWERS,
        target=target,
        train=train,
        resume_from=tmp_path / "step-000002",
    )
    assert sorted(numbers.column("train/loss")) == [3, 4, 5, 6]
    expected = once.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())


def test_a_training_that_differs_is_not_resumed(target, tmp_path):
    run_training(tmp_path, answers=ANSWERS, target=target)
    with pytest.raises(CheckpointError, match=r"optim\.lr: began with 0\.01, now 0\.02") as caught:
        run_training(
            tmp_path,
            answers=ANSWERS[:-1],
            target=target,
            optim=optim_settings(lr=0.02),
            resume_from=tmp_path,
        )
    assert "rows_checksum" in str(caught.value)


def test_other_drafter_settings_are_another_training(target, tmp_path):
    run_training(tmp_path, answers=ANSWERS, target=target)
    with pytest.raises(CheckpointError, match=r"drafter\.noise: began with 0\.1, now 0\.3"):
        run_training(
            tmp_path,
            answers=ANSWERS,
            target=target,
            drafter=toy_drafter(target, noise=0.3),
            resume_from=tmp_path,
        )


def test_a_gradient_that_is_no_number_stops_the_training(target, tmp_path):
    drafter = toy_drafter(target)
    with torch.no_grad():
        drafter.hidden.weight[0, 0] = math.nan
    with pytest.raises(DraftlabError, match="optimizer step 1 has norm nan"):
        run_training(tmp_path, answers=ANSWERS, target=target, drafter=drafter)


def test_a_drafter_without_parameters_is_refused(target, tmp_path):
    drafter = toy_drafter(target).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        run_training(tmp_path, answers=ANSWERS, target=target, drafter=drafter)


def test_bfloat16_computes_with_float32_weights(tmp_path):
    target = tiny_target(dtype=torch.bfloat16)
    drafter = toy_drafter(target)
    assert drafter.hidden.weight.dtype == torch.bfloat16
    seen = []
    drafter.hidden.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    _, _, numbers = run_training(
        tmp_path,
        answers=ANSWERS,
        target=target,
        drafter=drafter,
        train=train_settings(precision="bf16", max_steps=30),
        optim=optim_settings(schedule="constant", lr=0.01),
    )
    assert drafter.hidden.weight.dtype == torch.float32
    assert set(seen) == {torch.bfloat16}
    losses = numbers.column("train/loss")
    assert losses[30] < losses[1] - 0.5


def test_lines_are_means_over_the_steps_since_the_last(target, tmp_path):
    fine, coarse = Recorder(), Recorder()
    for name, every, recorder in (("fine", 1, fine), ("coarse", 2, coarse)):
        run_training(
            tmp_path / name,
            answers=ANSWERS,
            target=target,
            train=train_settings(log_every_steps=every, batch_rows=4),
            metrics=recorder,
        )
    each, pairs = fine.column("train/loss"), coarse.column("train/loss")
    assert pairs == pytest.approx(
        {2: (each[1] + each[2]) / 2, 4: (each[3] + each[4]) / 2}, rel=1e-9
    )
