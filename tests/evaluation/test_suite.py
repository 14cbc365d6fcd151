"""The whole suite on a tiny target: what it promises, measured."""

import json
from dataclasses import replace

import pytest
import torch

from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.ngram import Ngram, NgramSettings
from draftlab.errors import ConfigError
from draftlab.evaluation.draft_length import choose_draft_length
from draftlab.evaluation.files import read_eval
from draftlab.evaluation.results import BASELINE
from draftlab.evaluation.settings import EvalSettings
from draftlab.evaluation.suite import AGAIN, evaluate
from draftlab.targets.tiny import tiny_target
from tests.evaluation.shipped import settings_from


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def ngram(target):
    return Ngram(settings_from(NgramSettings, "drafter/ngram.yaml"), target.view)


SETTINGS = settings_from(
    EvalSettings,
    "eval/smoke.yaml",
    prompts_per_domain=4,
    max_new_tokens=10,
    speed_prompts_per_domain=2,
    speed_max_new_tokens=8,
    noise_floor=True,
)
GREEDY = settings_from(DecodeSettings, "decode/greedy.yaml")


def prompts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        domain: [torch.randint(0, 250, (n + 3,), generator=generator).tolist() for n in range(5)]
        for domain in ("copying", "talking")
    }


@pytest.fixture(scope="module")
def evaluated(target, ngram, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    seen = []
    result = evaluate(
        target,
        {"ngram": ngram},
        prompts(),
        SETTINGS,
        GREEDY,
        validation=prompts(1),
        folder=folder,
        progress=lambda what, done, total: seen.append((what, done, total)),
    )
    return result, folder, seen


def test_every_domain_is_measured_and_the_audit_covers_what_was_timed(evaluated):
    result, folder, _ = evaluated
    arm = result.arm("ngram")
    assert [d.domain for d in arm.domains] == ["copying", "talking"]
    assert [d.acceptance.num_prompts for d in arm.domains] == [4, 4]
    timed = [r for r in read_eval(folder).answers if (r["arm"], r["phase"]) == ("ngram", "speed")]
    assert len(timed) == 4
    assert arm.audit.num_positions == sum(r["num_output_tokens"] for r in timed)
    assert arm.audit.is_lossless
    assert arm.speed.num_identical == arm.audit.num_identical == 4


def test_k_is_chosen_among_the_candidates(evaluated):
    choice = evaluated[0].arm("ngram").choice
    assert choice.num_draft_tokens in (2, 4)
    assert choice.num_prompts == SETTINGS.draft_length_prompts


def test_a_given_k_is_kept(target, ngram):
    fixed = GREEDY.model_copy(update={"num_draft_tokens": 3})
    quick = SETTINGS.model_copy(update={"speed_prompts_per_domain": 0, "prompts_per_domain": 1})
    arm = evaluate(target, {"ngram": ngram}, prompts(), quick, fixed, validation=prompts(1)).arms[0]
    assert (arm.num_draft_tokens, arm.choice, arm.speed, arm.audit) == (3, None, None, None)


def test_k_is_chosen_on_rounds_that_draft_though_the_evaluation_may_rest(
    target, ngram, monkeypatch
):
    chosen = []

    def choose(decoder_at, prompts, candidates, **rest):
        chosen.append(decoder_at(candidates[-1]).settings)
        return choose_draft_length(decoder_at, prompts, candidates, **rest)

    monkeypatch.setattr("draftlab.evaluation.suite.choose_draft_length", choose)
    resting = GREEDY.model_copy(update={"fallback": True})
    quick = SETTINGS.model_copy(update={"speed_prompts_per_domain": 0, "prompts_per_domain": 1})
    arm = evaluate(target, {"ngram": ngram}, prompts(), quick, resting, validation=prompts(1)).arms[
        0
    ]
    assert arm.choice is not None
    assert [(made.fallback, made.graphs) for made in chosen] == [(False, "off")]


def test_the_files_hold_every_answer_and_step_and_no_text(evaluated):
    result, folder, _ = evaluated
    rows = [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]
    assert {r["arm"] for r in rows} == {"ngram", BASELINE, AGAIN}
    assert len(rows) == 2 * 4 + 3 * 4
    assert not any("ids" in key or "text" in key for row in rows for key in row)
    steps = (folder / "steps.jsonl").read_text().splitlines()
    assert len(steps) == sum(r["num_steps"] for r in rows)
    assert read_eval(folder).result == result


def test_the_baseline_is_timed_against_itself(evaluated):
    assert evaluated[0].noise_floor.value > 0


def test_progress_ends_at_its_total_in_every_stage(evaluated):
    last = {what: (done, total) for what, done, total in evaluated[2]}
    assert len(last) == 4
    assert all(done == total for done, total in last.values())


def test_a_second_stage_merges_and_keeps_the_lines_of_the_first(target, ngram, evaluated, tmp_path):
    result, folder, _ = evaluated
    for name in ("generations.jsonl", "steps.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    both = evaluate(
        target, {"other": ngram}, prompts(), SETTINGS, GREEDY, earlier=result, folder=tmp_path
    )
    assert [arm.name for arm in both.arms] == ["ngram", "other"]
    rows = read_eval(tmp_path).answers
    assert {r["arm"] for r in rows} == {"ngram", "other", BASELINE, AGAIN}
    # each drafter keeps the baseline it was timed beside, in both files
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    for lines in (rows, steps):
        plain = [r["beside"] for r in lines if r["arm"] == BASELINE]
        assert plain.count(["ngram"]) == plain.count(["other"]) == len(plain) / 2
        assert not any("beside" in r for r in lines if r["arm"] in ("ngram", "other"))


def test_a_drafter_measured_anew_loses_its_old_baseline_and_no_other(target, ngram, tmp_path):
    quick = SETTINGS.model_copy(update={"audit": False, "draft_lengths": (), "noise_floor": False})

    def stage(earlier, *names):
        return evaluate(
            target,
            dict.fromkeys(names, ngram),
            prompts(),
            quick,
            GREEDY,
            earlier=earlier,
            folder=tmp_path,
        )

    first = stage(None, "a", "b")
    second = stage(first, "b")
    plain = [r["beside"] for r in read_eval(tmp_path).answers if r["arm"] == BASELINE]
    assert (plain.count(["a"]), plain.count(["b"]), len(plain)) == (4, 4, 8)
    stage(second, "a", "b")
    plain = [r["beside"] for r in read_eval(tmp_path).answers if r["arm"] == BASELINE]
    assert plain == [["a", "b"]] * 4
    # a file from before that was noted: its baseline stays while a drafter of it does
    path = tmp_path / "generations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r | {"beside": None}) + "\n" for r in rows))
    path.write_text(path.read_text().replace(', "beside": null', ""))
    stage(second, "b")
    plain = [r.get("beside") for r in read_eval(tmp_path).answers if r["arm"] == BASELINE]
    assert (plain.count(None), plain.count(["b"])) == (4, 4)


def test_a_stage_on_other_prompts_cannot_be_merged(target, ngram, evaluated):
    quick = SETTINGS.model_copy(update={"audit": False})
    with pytest.raises(ConfigError, match="prompts_sha256"):
        evaluate(target, {"x": ngram}, prompts(7), quick, GREEDY, earlier=evaluated[0])


def test_samples_are_kept_as_text_only_when_asked(target, ngram, tmp_path):
    wanted = SETTINGS.model_copy(
        update={"samples": True, "speed_prompts_per_domain": 0, "prompts_per_domain": 1}
    )
    evaluate(target, {"ngram": ngram}, prompts(), wanted, GREEDY, folder=tmp_path)
    assert all(isinstance(r["output_text"], str) for r in read_eval(tmp_path).answers)


def test_no_drafter_a_reserved_name_and_an_empty_domain_are_refused(target, ngram):
    with pytest.raises(ConfigError, match="no drafter"):
        evaluate(target, {}, prompts(), SETTINGS, GREEDY)
    with pytest.raises(ConfigError, match="baseline"):
        evaluate(target, {"baseline": ngram}, prompts(), SETTINGS, GREEDY)
    with pytest.raises(ConfigError, match="empty-one"):
        evaluate(target, {"ngram": ngram}, {**prompts(), "empty-one": []}, SETTINGS, GREEDY)


def test_a_decoder_that_lies_is_caught_by_the_suite(target, ngram, monkeypatch):
    """Negative control of the whole chain: one flipped token in the drafter's timed answers."""
    from draftlab.decoding.decoder import Decoder

    real = Decoder.generate

    def lying(self, prompts, **kwargs):
        answers = real(self, prompts, **kwargs)
        if self.drafter is None or kwargs.get("batch_size") != 1:
            return answers
        ids = answers[0].output_ids
        return [replace(answers[0], output_ids=(*ids[:-1], (ids[-1] + 1) % 250))]

    monkeypatch.setattr(Decoder, "generate", lying)
    quick = SETTINGS.model_copy(update={"noise_floor": False, "warmup_prompts": 0})
    result = evaluate(target, {"ngram": ngram}, prompts(), quick, GREEDY)
    assert result.num_defects >= 4
    assert result.arms[0].audit.num_identical == 0
