from dataclasses import replace

import pytest
import torch

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.records import Generation
from draftlab.decoding.settings import DecodeSettings
from draftlab.evaluation.lossless import Answer, audit, measure_tolerance, score_narrow
from draftlab.sampling import GREEDY, Sampling
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target
from tests.evaluation.shipped import settings_from

PROMPTS = [(7, 8, 9, 10), (40, 41), tuple(range(60, 75))]


@pytest.fixture(scope="module")
def target():
    target = tiny_target()
    # random text would end anywhere; the one test about ends sets its own
    target.spec = replace(target.spec, eos_ids=())
    return target


def plain_greedy(target, prompt, length):
    """Decode without any code of ours but the target itself: whole prefix, one pass a token."""
    ids = list(prompt)
    for _ in range(length):
        with torch.inference_mode():
            kv = target.open_kv(1, len(ids))
            step = Step(torch.tensor([0]), torch.tensor([ids]), torch.tensor([0]), len(ids))
            ids.append(int(target.run(kv, step).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.fixture(scope="module")
def answers(target):
    outs = [plain_greedy(target, prompt, 12) for prompt in PROMPTS]
    return [
        Generation(i, prompt, out, "length", (), 0.0, 0.0)
        for i, (prompt, out) in enumerate(zip(PROMPTS, outs, strict=True))
    ]


def audited(target, answers, **kwargs):
    return audit(target, answers, draft_width=3, prefill_tokens=8, **kwargs)


def with_token(answer, position, token):
    ids = list(answer.output_ids)
    ids[position] = token
    return replace(answer, output_ids=tuple(ids))


def test_true_greedy_output_passes(target, answers):
    verdict = audited(target, answers, baseline=answers)
    assert verdict.is_lossless
    assert (verdict.num_positions, verdict.num_exact) == (36, 36)
    assert (verdict.num_identical, verdict.num_compared) == (3, 3)


def test_an_arm_whose_answers_were_scored_before_still_shows_its_audit(target, answers):
    cache, seen = {}, []
    for _ in range(2):
        audited(target, answers, cache=cache, progress=lambda *shown: seen.append(shown))
        assert seen.pop() == (36, 36)
    assert not seen


def test_a_planted_wrong_token_is_found_where_it_is(target, answers):
    planted = [
        answers[0],
        with_token(answers[1], 5, (answers[1].output_ids[5] + 1) % 250),
        answers[2],
    ]
    verdict = audited(target, planted, baseline=answers)
    assert not verdict.is_lossless
    first = verdict.defects[0]
    assert (first.prompt, first.position) == (1, 5)
    assert first.expected_id == answers[1].output_ids[5]
    assert first.margin > verdict.tolerance
    assert (verdict.num_identical, verdict.first_divergence) == (2, 5)


def test_a_wrong_last_token_and_a_wrong_first_token_are_found(target, answers):
    for position in (0, 11):
        wrong = with_token(answers[2], position, (answers[2].output_ids[position] + 1) % 250)
        assert any(d.position == position for d in audited(target, [wrong]).defects)


def test_a_token_after_an_end_token_is_a_defect_even_if_the_target_would_say_it(target, answers):
    spec = replace(target.spec, eos_ids=(answers[0].output_ids[3],))
    original, target.spec = target.spec, spec
    try:
        ends = answers[0].output_ids.index(spec.eos_ids[0])
        verdict = audited(target, answers[:1])
        assert verdict.num_defects == 12 - ends - 1
        assert audited(target, answers[:1], ends_at_eos=False).is_lossless
    finally:
        target.spec = original


@pytest.mark.parametrize("probed", [False, True])
def test_a_near_tie_is_excused_only_where_passes_were_measured_to_differ(
    target, answers, monkeypatch, probed
):
    wrong = [with_token(answers[0], 11, (answers[0].output_ids[11] + 1) % 250)]
    monkeypatch.setitem(target.report, "rows_bitwise_equal", probed)
    measured = "draftlab.evaluation.lossless.measure_tolerance"
    monkeypatch.setattr(measured, lambda *a, **k: 1e9)
    excused = audited(target, wrong)
    assert (excused.num_ties, excused.num_defects, excused.requires_identity) == (1, 0, False)
    monkeypatch.setattr(measured, lambda *a, **k: 0.0)
    strict = audited(target, wrong)
    assert (strict.num_ties, strict.num_defects, strict.requires_identity) == (0, 1, probed)


def test_logits_that_are_no_numbers_are_never_excused(target, answers, monkeypatch):
    from draftlab.evaluation import lossless

    real = lossless.run_at
    monkeypatch.setattr(lossless, "run_at", lambda *a, **k: real(*a, **k) * float("nan"))
    assert audited(target, answers[:1]).num_defects == 12


def test_batch_mates_do_not_change_a_score(target, answers):
    pairs: list[Answer] = [(a.prompt_ids, a.output_ids) for a in answers]
    together = score_narrow(target, pairs, sampling=GREEDY, prefill_tokens=4)
    for pair, scores in zip(pairs, together, strict=True):
        alone = score_narrow(target, [pair], sampling=GREEDY, prefill_tokens=64)[0]
        assert [s.expected_id for s in alone] == [s.expected_id for s in scores]
        assert [s.margin for s in alone] == pytest.approx([s.margin for s in scores], abs=1e-9)


def test_the_measured_tolerance_is_of_rounding_size(target, answers):
    pairs: list[Answer] = [(a.prompt_ids, a.output_ids) for a in answers]
    in_float64 = measure_tolerance(target, pairs, width=4, prefill_tokens=8)
    assert 0 <= in_float64 < 1e-9
    half = tiny_target(dtype=torch.bfloat16)
    assert in_float64 < measure_tolerance(half, pairs, width=4, prefill_tokens=8) < 1


def test_sampled_output_needs_probability_only(target, answers):
    wrong = [with_token(answers[0], 4, (answers[0].output_ids[4] + 1) % 250)]
    free = audited(target, wrong, sampling=Sampling(temperature=1.0))
    assert free.is_lossless
    assert not free.is_greedy
    # with top_k 1 only the likeliest token has mass, so the planted one has none
    assert audited(target, wrong, sampling=Sampling(temperature=1.0, top_k=1)).num_defects >= 1


def test_penalties_and_biases_are_part_of_the_score(target):
    how = settings_from(
        DecodeSettings,
        "decode/greedy.yaml",
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={5: 2.0},
        max_new_tokens=12,
        batch_size=3,
    )
    answers = Decoder(target, None, how).generate(PROMPTS)
    assert audited(target, answers, sampling=how.sampling).is_lossless
    assert not audited(target, answers).is_lossless
    as_drawn = replace(how.sampling, temperature=1.0, top_k=1)
    assert audited(target, answers, sampling=as_drawn).is_lossless


def test_an_end_token_that_comes_too_early_is_a_defect(target, answers, monkeypatch):
    early = answers[0].output_ids[3]
    monkeypatch.setattr(target, "spec", replace(target.spec, eos_ids=(early,)))
    short = [replace(answers[0], output_ids=answers[0].output_ids[:4])]
    assert audited(target, short, sampling=Sampling(min_new_tokens=3)).is_lossless
    assert audited(target, short, sampling=Sampling(min_new_tokens=4)).num_defects == 1
