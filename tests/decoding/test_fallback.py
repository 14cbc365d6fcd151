"""Plain decoding while drafting does not pay, counted in work, never by a real clock."""

from dataclasses import replace

import pytest
import torch
from scripted import (
    FakeClock,
    Scripted,
    ScriptedSettings,
    decode_settings,
    perfect,
    wrong_from,
)

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.fallback import Fallback

PASS_S, COLUMN_S, DRAFT_S = 1.0, 0.05, 0.2
TOKENS = 400
BUDGETED = {"kind": "budgeted", "max_nodes": 4, "top_k": 1, "depth": 4}


def work_of(target, drafter, monkeypatch, prompts, **settings):
    """Seconds on a clock that passes and proposals alone move, and the answers."""
    clock = FakeClock()
    with monkeypatch.context() as patch:
        run = target.run

        def timed_run(kv, step, **rest):
            clock.pass_time(PASS_S + COLUMN_S * (step.ids.numel() - 1))
            return run(kv, step, **rest)

        patch.setattr(target, "run", timed_run)
        if drafter is not None:
            propose = drafter.propose

            def timed_propose(*args):
                clock.pass_time(DRAFT_S)
                return propose(*args)

            patch.setattr(drafter, "propose", timed_propose)
        decoder = Decoder(target, drafter, decode_settings(**settings), clock=clock)
        answers = decoder.generate(prompts, max_new_tokens=TOKENS, batch_size=1)
    return clock.seconds, [g.output_ids for g in answers]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return Decoder(target, None, decode_settings()).generate(prompts[:1], max_new_tokens=TOKENS)


@pytest.fixture(scope="module")
def knows(prompts, plain):
    return perfect({tuple(prompts[0]): list(plain[0].output_ids)})


def test_an_always_wrong_drafter_costs_a_few_percent_at_most(
    target, prompts, plain, knows, monkeypatch
):
    alone, _ = work_of(target, None, monkeypatch, prompts[:1])
    wrong = Scripted(wrong_from(knows, 0, 250))
    unguarded, _ = work_of(target, wrong, monkeypatch, prompts[:1])
    guarded, text = work_of(target, wrong, monkeypatch, prompts[:1], fallback=True)
    assert text == [plain[0].output_ids]
    assert unguarded > 1.35 * alone
    assert guarded < 1.03 * alone


class Unsure(Scripted, kind="unsure", settings=ScriptedSettings):
    """Tells that its drafts are bad."""

    def propose(self, state, budget, uniforms):
        tree = super().propose(state, budget, uniforms)
        return replace(tree, confidence=torch.full(tree.tokens.shape, 0.01))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda knows: Scripted(lambda prefix, depth: []), {}),
        (lambda knows: Unsure(knows), {"min_confidence": 0.5}),
        (lambda knows: Unsure(knows), {"tree": BUDGETED}),
    ],
    ids=["finds nothing", "unsure", "not worth its time"],
)
def test_a_drafter_whose_drafts_come_out_empty_rests_too(
    make, words, target, prompts, plain, knows, monkeypatch
):
    alone, _ = work_of(target, None, monkeypatch, prompts[:1])
    unguarded, _ = work_of(target, make(knows), monkeypatch, prompts[:1], **words)
    guarded, text = work_of(target, make(knows), monkeypatch, prompts[:1], fallback=True, **words)
    assert text == [plain[0].output_ids]
    assert unguarded > 1.15 * alone
    assert guarded < 1.07 * alone  # what passes cost is measured with 18 of them where that counts


def test_rounds_with_and_without_drafts_both_count():
    fallback = Fallback()
    for _ in range(3):
        fallback.note_plain(seconds=1.0, live=1)
    # 1.9 tokens a round for 1.6 seconds, though most rounds take 2
    for turn in range(200):
        has_found = turn % 5 < 3
        fallback.note_drafted(
            seconds=2.0 if has_found else 1.0, live=1, tokens=2.5 if has_found else 1.0
        )
        assert turn < 16 or fallback.wants_draft


def test_a_good_drafter_goes_on_drafting(target, prompts, knows, monkeypatch):
    free, _ = work_of(target, Scripted(knows), monkeypatch, prompts[:1])
    guarded, _ = work_of(target, Scripted(knows), monkeypatch, prompts[:1], fallback=True)
    assert guarded < 1.05 * free


def test_a_drafter_that_was_wrong_for_a_while_is_tried_again(target, prompts, knows, monkeypatch):
    start = len(prompts[0]) + 60

    def late(prefix, depth):
        right = depth if len(prefix) > start else 0
        return wrong_from(knows, right, 250)(prefix, depth)

    alone, _ = work_of(target, None, monkeypatch, prompts[:1])
    guarded, _ = work_of(target, Scripted(late), monkeypatch, prompts[:1], fallback=True)
    assert guarded < 0.6 * alone


def test_a_resting_drafter_has_seen_every_position_when_it_drafts_again(target, prompts, knows):
    drafter = Scripted(wrong_from(knows, 0, 250))
    decoder = Decoder(target, drafter, decode_settings(fallback=True), clock=FakeClock())
    decoder._fallback._plain_rounds_left = 30  # rests at once
    asked = []
    script = drafter.script
    drafter.script = lambda prefix, depth: asked.append(list(prefix)) or script(prefix, depth)
    (got,) = decoder.generate(prompts[:1], max_new_tokens=60)
    whole = [*got.prompt_ids, *got.output_ids]
    assert asked
    assert all(prefix == whole[: len(prefix)] for prefix in asked)
    assert len(asked[0]) > len(prompts[0]) + 20


def test_rows_come_and_go_while_a_drafter_rests(target, prompts):
    settings = decode_settings(max_new_tokens=20)
    plain = Decoder(target, None, settings).generate(prompts)
    script = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})
    clock = FakeClock()
    decoder = Decoder(
        target, Scripted(script), decode_settings(max_new_tokens=20, fallback=True), clock=clock
    )
    decoder._fallback._plain_rounds_left = 33
    got = decoder.generate(prompts, batch_size=2, max_new_tokens=[20, 3, 20, 9, 20, 1, 20])
    for answer, limit, expected in zip(got, [20, 3, 20, 9, 20, 1, 20], plain, strict=True):
        assert answer.output_ids == expected.output_ids[:limit]
    assert any(step.num_accepted for g in got for step in g.steps)


def test_pauses_double_while_drafting_keeps_failing_and_shrink_when_it_pays():
    fallback, pauses = Fallback(), []
    for _ in range(3):
        fallback.note_plain(seconds=1.0, live=1)
    for gives in (1.0, 1.0, 1.0, 3.0, 1.0):
        while fallback.wants_draft:
            fallback.note_drafted(seconds=1.5, live=1, tokens=gives)
            if gives > 1.5 and fallback._judged_after == 4:
                break
        pauses.append(fallback._plain_rounds_left)
        while not fallback.wants_draft:
            fallback.note_plain(seconds=1.0, live=1)
    assert pauses[:4] == [16, 32, 64, 0]
    assert pauses[4] == 16


def test_drafting_is_judged_by_plain_rounds_of_as_many_rows():
    fallback = Fallback()
    for _ in range(3):
        fallback.note_plain(seconds=0.8, live=8)
    drafted, plain = 0, 0
    for _ in range(400):
        if fallback.wants_draft:
            fallback.note_drafted(seconds=0.2, live=1, tokens=1.0)
            drafted += 1
        else:
            fallback.note_plain(seconds=0.1, live=1)
            plain += 1
    assert drafted < 0.05 * plain


def test_one_slow_plain_round_does_not_keep_a_bad_drafter_drafting():
    fallback = Fallback()
    fallback.note_plain(seconds=50.0, live=1)  # the very first pass warms up
    for _ in range(4):
        fallback.note_drafted(seconds=1.5, live=1, tokens=1.0)
    rounds = 0
    while not fallback.wants_draft and rounds < 2:
        fallback.note_plain(seconds=1.0, live=1)
        rounds += 1
    fallback.note_drafted(seconds=1.5, live=1, tokens=1.0)
    assert rounds == 2
    assert not fallback.wants_draft
