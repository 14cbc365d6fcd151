"""Rows of one batch with samplers, limits and ends of their own: each as if it were alone."""

import pytest
import torch
from scripted import Markov, Scripted, decode_settings, perfect, wrong_from
from torch.nn.functional import one_hot

from draftlab.decoding.decoder import Decoder
from draftlab.drafters.base import drafter_class
from draftlab.errors import ConfigError
from draftlab.sampling import Sampling

SAMPLERS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=20),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=1.3, top_p=0.8, frequency_penalty=0.7),
    Sampling(temperature=0.9, min_p=0.05, presence_penalty=1.0, min_new_tokens=6),
    Sampling(logit_bias=((7, 3.0), (9, -float("inf")))),
    Sampling(frequency_penalty=1.5, min_new_tokens=9),
]


def outputs(generations):
    return [g.output_ids for g in generations]


@pytest.fixture(scope="module")
def many():
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randint(0, 256, (3 + n * 5 % 23,), generator=generator).tolist() for n in range(32)
    ]


@pytest.fixture(scope="module")
def laws():
    return torch.rand(320, 250, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def drafters(target, laws):
    ngram = drafter_class("ngram")
    settings = ngram.settings_class(kind="ngram", num_draft_tokens=3, max_ngram=2, min_ngram=1)
    return {
        "ngram": ngram(settings, target.view),
        "markov": GreedyAware((laws**8) / (laws**8).sum(1, keepdim=True)),
    }


class GreedyAware(Markov, kind="greedy_aware", settings=Markov.settings_class):
    """Proposes its likeliest tokens for rows where nothing is drawn, as the contract asks."""

    def law_after(self, before, budget):
        laws = getattr(budget.sampling, "laws", [budget.sampling] * before.shape[0])
        points = one_hot(self.laws.argmax(1), self.laws.shape[1]).to(self.laws.dtype)
        is_greedy = torch.tensor([law.is_greedy for law in laws]).unsqueeze(1)
        return torch.where(is_greedy, points[before], self.laws[before])


@pytest.mark.parametrize("kind", ["ngram", "markov"])
def test_32_ragged_rows_with_mixed_samplers_equal_the_same_rows_alone(target, many, laws, kind):
    drafter = drafters(target, laws)[kind]
    samplers = [SAMPLERS[i % len(SAMPLERS)] for i in range(32)]
    limits = [3 + i * 7 % 13 for i in range(32)]
    decoder = Decoder(target, drafter, decode_settings(ignore_eos=False))
    together = decoder.generate(many, sampling=samplers, max_new_tokens=limits, batch_size=32)
    refilled = decoder.generate(many, sampling=samplers, max_new_tokens=limits, batch_size=5)
    alone = [
        decoder.generate([p], sampling=s, max_new_tokens=m, row_keys=[i])[0]
        for i, (p, s, m) in enumerate(zip(many, samplers, limits, strict=True))
    ]
    assert outputs(together) == outputs(alone)
    assert outputs(refilled) == outputs(alone)
    assert sum(s.num_accepted for g in alone for s in g.steps) > 0


@pytest.mark.parametrize("law", [s for s in SAMPLERS if s.is_greedy][1:])
def test_greedy_decoding_with_penalties_equals_plain_decoding(target, prompts, law):
    settings = decode_settings(ignore_eos=False)
    plain = Decoder(target, None, settings).generate(prompts, sampling=law)
    script = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})
    for right in (0, 2, 4):
        drafter = Scripted(wrong_from(script, right, 250))
        got = Decoder(target, drafter, settings).generate(prompts, sampling=law)
        assert outputs(got) == outputs(plain)


def test_sampled_verify_with_penalties_gives_the_text_of_plain_sampling(target, prompts):
    laws = [SAMPLERS[1 + i % 7] for i in range(len(prompts))]
    laws = [law if not law.is_greedy else SAMPLERS[4] for law in laws]
    settings = decode_settings(temperature=1.0, rule="sampled_verify", ignore_eos=False)
    plain = Decoder(target, None, settings).generate(prompts, sampling=laws)
    script = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})
    got = Decoder(target, Scripted(wrong_from(script, 2, 250)), settings).generate(
        prompts, sampling=laws, batch_size=4
    )
    assert outputs(got) == outputs(plain)


def test_no_end_token_comes_before_the_least_length(target, prompts, monkeypatch):
    plain = Decoder(target, None, decode_settings()).generate(prompts)
    ends = frozenset(plain[0].output_ids[1:3])
    for drafter in (None, Scripted(lambda prefix, depth: [next(iter(ends))] * depth)):
        decoder = Decoder(target, drafter, decode_settings(ignore_eos=False))
        monkeypatch.setattr(decoder, "_eos", ends)
        got = decoder.generate(prompts, sampling=Sampling(min_new_tokens=5))
        for answer in got:
            assert not ends & set(answer.output_ids[:5])
            assert answer.finish == "length" or answer.output_ids[-1] in ends


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_the_first_of_several_end_tokens_ends_the_answer_inside_a_run(
    target, prompts, depth, monkeypatch
):
    plain = Decoder(target, None, decode_settings()).generate(prompts)
    script = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})
    ends = frozenset({plain[0].output_ids[6], plain[1].output_ids[4], plain[2].output_ids[9], 999})
    decoder = Decoder(target, Scripted(script, depth), decode_settings(ignore_eos=False))
    monkeypatch.setattr(decoder, "_eos", ends)
    for answer, whole in zip(decoder.generate(prompts), plain, strict=True):
        place = next((i for i, t in enumerate(whole.output_ids) if t in ends), None)
        expected = whole.output_ids if place is None else whole.output_ids[: place + 1]
        assert answer.output_ids == expected
        assert answer.finish == ("length" if place is None else "eos")


@pytest.mark.parametrize("depth", [1, 4, 6])
def test_a_stop_string_ends_the_answer_at_the_same_token_with_and_without_drafts(
    target, prompts, depth
):
    plain = Decoder(target, None, decode_settings()).generate(prompts)
    script = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})
    ascii_pairs = [
        target.tokenizer.decode(list(g.output_ids[i : i + 2]))
        for g in plain
        for i in range(2, 20)
        if all(33 <= t < 127 for t in g.output_ids[i : i + 2])
    ]
    stop = ascii_pairs[:3]
    assert stop
    expected = Decoder(target, None, decode_settings()).generate(prompts, stop=stop)
    decoder = Decoder(target, Scripted(script, depth), decode_settings(stop=stop))
    got = decoder.generate(prompts, batch_size=2)
    assert [(g.output_ids, g.finish, g.text) for g in got] == [
        (g.output_ids, g.finish, g.text) for g in expected
    ]
    assert any(g.finish == "stop" for g in got)
    assert all(s not in g.text for g in got for s in stop)


def test_as_many_settings_as_prompts_are_asked_for(target, prompts):
    decoder = Decoder(target, None, decode_settings())
    with pytest.raises(ConfigError, match="sampling has 2 entries for 7 prompts"):
        decoder.generate(prompts, sampling=[Sampling(), Sampling()])
    with pytest.raises(ConfigError, match=r"max_new_tokens=0 of prompts\[1\]"):
        decoder.generate(prompts[:2], max_new_tokens=[3, 0])
    with pytest.raises(ConfigError, match="logit_bias names id 9999"):
        decoder.generate(prompts, sampling=Sampling(logit_bias=((9999, 1.0),)))


def test_lossy_answers_say_so(target, prompts):
    lossy = {"rule": "threshold", "lossy": True, "lossy_threshold": 0.5, "temperature": 1.0}
    decoder = Decoder(target, Scripted(lambda p, d: [1] * d), decode_settings(**lossy))
    assert decoder.is_lossy
    assert all(g.is_lossy for g in decoder.generate(prompts[:2]))
    with pytest.raises(ConfigError, match=r"decode\.lossy=true allows it"):
        Decoder(
            target,
            Scripted(lambda p, d: [1] * d),
            decode_settings(**{**lossy, "lossy": False}),
        )
    exact = Decoder(target, None, decode_settings(**lossy))
    assert not exact.generate(prompts[:1])[0].is_lossy
