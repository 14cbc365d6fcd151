"""Greedy identity in float64, without tolerance: every accept pattern, batch, limit and end."""

import pytest
import torch
from scripted import Scripted, decode_settings, perfect, wrong_from

from draftlab.decoding.decoder import Decoder
from draftlab.drafters.base import drafter_class
from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.targets.features import FeatureRequest
from draftlab.targets.tiny import TINY_FAMILIES, tiny_target


def outputs(generations):
    return [g.output_ids for g in generations]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return Decoder(target, None, decode_settings()).generate(prompts, batch_size=1)


@pytest.fixture(scope="module")
def knows(prompts, plain):
    return perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("right", range(5))
def test_greedy_output_equals_plain_decoding_for_every_number_of_right_drafts(
    target, prompts, plain, knows, right, batch
):
    drafter = Scripted(wrong_from(knows, right, target.spec.num_token_ids))
    got = Decoder(target, drafter, decode_settings()).generate(prompts, batch_size=batch)
    assert outputs(got) == outputs(plain)
    accepted = [s.num_accepted for g in got for s in g.steps if s.num_drafted == 4]
    assert set(accepted) == {right}


def test_rows_of_a_batch_may_accept_different_numbers(target, prompts, plain, knows):
    def mixed(prefix, depth):
        return wrong_from(knows, len(prefix) % 5, target.spec.num_token_ids)(prefix, depth)

    got = Decoder(target, Scripted(mixed), decode_settings()).generate(prompts, batch_size=4)
    assert outputs(got) == outputs(plain)
    assert len({s.num_accepted for g in got for s in g.steps}) > 2


def test_a_row_that_drafts_nothing_changes_nothing_for_the_others(target, prompts, plain, knows):
    def every_other(prefix, depth):
        return knows(prefix, depth) if len(prefix) % 2 else []

    got = Decoder(target, Scripted(every_other), decode_settings()).generate(prompts, batch_size=4)
    assert outputs(got) == outputs(plain)


@pytest.mark.parametrize("width", [1, 5, 64])
def test_the_size_of_prompt_chunks_changes_nothing(target, prompts, plain, knows, width):
    settings = decode_settings(prefill_tokens=width, max_new_tokens=8)
    expected = [g.output_ids[:8] for g in plain]
    assert outputs(Decoder(target, None, settings).generate(prompts)) == expected
    assert outputs(Decoder(target, Scripted(knows), settings).generate(prompts)) == expected


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_decodes_as_plain_decoding_does(family, prompts):
    target = tiny_target(family)
    prompts = prompts[:4]  # below, across and past the window of those that have one
    settings = decode_settings(max_new_tokens=12)
    plain = Decoder(target, None, settings).generate(prompts, batch_size=1)
    knows = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})
    for right in (0, 2, 4):
        drafter = Scripted(wrong_from(knows, right, target.spec.num_token_ids))
        got = Decoder(target, drafter, settings).generate(prompts, batch_size=3)
        assert outputs(got) == outputs(plain), (family, right)


def test_plain_decoding_equals_transformers_generate(target, prompts, plain):
    for prompt, generation in zip(prompts, plain, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(24):
            logits = target.forward_plainly(ids).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert tuple(ids[0, len(prompt) :].tolist()) == generation.output_ids


@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("place", [1, 2, 3, 6, 7])
def test_an_end_token_ends_the_answer_wherever_it_falls_in_a_block(
    target, prompts, plain, knows, depth, place, monkeypatch
):
    # case O-27: the token at this place of the plain answer becomes an end token
    end = plain[0].output_ids[place]
    expected = plain[0].output_ids[: plain[0].output_ids.index(end) + 1]
    decoder = Decoder(target, Scripted(knows, depth), decode_settings(ignore_eos=False))
    monkeypatch.setattr(decoder, "_eos", frozenset({end, 99_999}))
    got = decoder.generate(prompts[:1])[0]
    assert got.output_ids == expected
    assert got.finish == "eos"
    assert 1 + sum(s.num_emitted for s in got.steps) == len(expected)


@pytest.mark.parametrize("limit", range(1, 13))
def test_the_limit_holds_inside_a_block(target, prompts, plain, knows, limit):
    got = Decoder(target, Scripted(knows), decode_settings()).generate(
        prompts, max_new_tokens=limit
    )
    assert outputs(got) == [g.output_ids[:limit] for g in plain]
    assert all(g.finish == "length" for g in got)


def test_answers_reach_the_targets_last_position_and_stop_there(target, knows):
    longest = target.spec.max_positions
    prompt = [i % 250 for i in range(longest - 9)]
    plain = Decoder(target, None, decode_settings()).generate([prompt])[0]
    assert len(plain.output_ids) == 9
    drafter = Scripted(perfect({tuple(prompt): list(plain.output_ids)}), 6)
    got = Decoder(target, drafter, decode_settings()).generate([prompt])[0]
    assert got.output_ids == plain.output_ids


def test_a_prompt_that_leaves_no_room_is_refused(target):
    prompt = [1] * target.spec.max_positions
    with pytest.raises(ConfigError, match=f"{target.spec.max_positions} tokens"):
        Decoder(target, None, decode_settings()).generate([prompt])
    with pytest.raises(ConfigError, match=r"prompts\[1\] is empty"):
        Decoder(target, None, decode_settings()).generate([[1], []])


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_1_is_refused_and_never_taken_for_the_settings(target, limit):
    decoder = Decoder(target, None, decode_settings())
    with pytest.raises(ConfigError, match=f"max_new_tokens={limit} of prompts"):
        decoder.generate([[1, 2]], max_new_tokens=limit)
    with pytest.raises(ConfigError, match=f"batch_size={limit}; expected 1 or more"):
        decoder.generate([[1, 2]], batch_size=limit)


def test_ids_outside_the_vocabulary_are_refused_by_name(target):
    last = target.spec.vocab_size - 1
    decoder = Decoder(target, None, decode_settings(max_new_tokens=1))
    for wrong in (999999, last + 1, -1):
        with pytest.raises(
            ConfigError, match=rf"prompts\[1\] holds token id {wrong},.*0 to {last}"
        ):
            decoder.generate([[1], [5, wrong, 7]])
    assert len(decoder.generate([[last]])) == 1


def test_step_records_count_what_was_drafted_accepted_and_emitted(target, prompts, plain, knows):
    # case O-31: perfect, never, and two right of four
    tau = {}
    for right in (4, 0, 2):
        drafter = Scripted(wrong_from(knows, right, target.spec.num_token_ids))
        got = Decoder(target, drafter, decode_settings(max_new_tokens=21)).generate(prompts[:1])[0]
        whole = [s for s in got.steps if s.num_drafted == 4]
        tau[right] = sum(s.num_accepted + 1 for s in whole) / len(whole)
        assert len(got.output_ids) == 1 + sum(s.num_emitted for s in got.steps)
    assert tau == {4: 5.0, 0: 1.0, 2: 3.0}


def test_a_drafter_observes_every_position_once_with_the_token_after_it(target, prompts, knows):
    drafter = Scripted(knows)
    decoder = Decoder(target, drafter, decode_settings(prefill_tokens=7))
    got = decoder.generate(prompts[3:4], batch_size=1)[0]
    ids, partners = [], []
    for seen in drafter.seen:
        n = int(seen.lengths[0])
        ids += seen.ids[0, :n].tolist()
        partners += seen.next_ids[0, :n].tolist()
    whole = [*got.prompt_ids, *got.output_ids]
    assert ids == whole[: len(ids)]
    assert partners == whole[1 : len(ids) + 1]
    assert len(ids) >= len(whole) - 5


def test_sampled_verify_gives_the_text_of_plain_sampling_token_for_token(target, prompts, knows):
    sampled = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12}
    settings = decode_settings(**sampled, rule="sampled_verify")
    plain = Decoder(target, None, decode_settings(**sampled)).generate(prompts)
    script = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})
    for drafter in (Scripted(script), Scripted(wrong_from(script, 1, 250))):
        got = Decoder(target, drafter, settings).generate(prompts, batch_size=2)
        assert outputs(got) == outputs(plain)


def test_a_rows_draws_do_not_depend_on_its_batch_mates(target, prompts):
    ngram = drafter_class("ngram")
    settings = ngram.settings_class(kind="ngram", num_draft_tokens=3, max_ngram=2, min_ngram=1)
    drafter = ngram(settings, target.view)
    decoder = Decoder(target, drafter, decode_settings(temperature=1.0, max_new_tokens=12))
    together = decoder.generate(prompts, batch_size=7)
    alone = [decoder.generate([p], row_keys=[i])[0] for i, p in enumerate(prompts)]
    assert outputs(together) == outputs(alone)


def test_equal_seeds_repeat_and_other_seeds_do_not(target, prompts):
    one, again, other = (
        outputs(
            Decoder(target, None, decode_settings(temperature=1.0, seed=s)).generate(prompts[:3])
        )
        for s in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_a_rule_that_the_temperature_makes_meaningless_is_refused(target, knows):
    with pytest.raises(ConfigError, match="rule=speculative at temperature 0"):
        Decoder(target, Scripted(knows), decode_settings(rule="speculative"))
    with pytest.raises(ConfigError, match="rule=exact_match"):
        Decoder(target, Scripted(knows), decode_settings(rule="exact_match", temperature=1.0))


def test_a_target_that_cannot_be_rolled_back_is_refused_with_the_reason(target, monkeypatch):
    monkeypatch.setattr(target, "speculation_refusal", "it keeps a recurrent state")
    with pytest.raises(UnsupportedTarget, match="recurrent state"):
        Decoder(target, None, decode_settings())


def test_hidden_states_given_to_a_listener_equal_a_whole_pass(target, prompts):
    from draftlab.decoding.regenerate import FeatureRecorder

    recorder = FeatureRecorder(FeatureRequest((1, 4), wants_final=True))
    got = Decoder(target, None, decode_settings(), listener=recorder).generate(prompts)
    for index, generation in enumerate(got):
        ids = torch.tensor([[*generation.prompt_ids, *generation.output_ids]])[:, :-1]
        whole = target.forward_plainly(ids, recorder.needs).features
        seen = recorder.take(index, ids.shape[1])
        assert torch.allclose(seen.taps, whole.taps[0], atol=1e-9)
        assert torch.allclose(seen.final, whole.final[0], atol=1e-9)
