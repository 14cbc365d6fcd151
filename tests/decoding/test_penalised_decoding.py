"""Penalties, bias and least lengths: speculative greedy answers equal transformers' `generate`.

Penalties must see drafted ancestors: a drafter that is right most of the time makes them count
inside one verify step.
"""

import pytest
import torch
from scripted import Scripted, decode_settings, perfect, wrong_from

from draftlab.decoding.decoder import Decoder
from draftlab.sampling import ContextTracker, Sampling
from draftlab.targets.tiny import build_tiny_model

LENGTH = 24
CASES = [
    (Sampling(repetition_penalty=1.6), {"repetition_penalty": 1.6}),
    (Sampling(repetition_penalty=0.6), {"repetition_penalty": 0.6}),
    (Sampling(logit_bias=((7, 9.0), (40, -50.0))), {"sequence_bias": {(7,): 9.0, (40,): -50.0}}),
    (
        Sampling(min_new_tokens=20, repetition_penalty=1.3),
        {"min_new_tokens": 20, "repetition_penalty": 1.3},
    ),
]


@pytest.fixture(scope="module")
def model():
    return build_tiny_model("llama")


@pytest.fixture(scope="module")
def eos_ids(target, prompts):
    """The end token of this target, and one that it likes: otherwise no answer would ever end."""
    (answer,) = Decoder(target, None, decode_settings()).generate(prompts[:1])
    return {*target.spec.eos_ids, answer.output_ids[6]}


@pytest.fixture
def ending(target, eos_ids, monkeypatch):
    """A decoder whose answers may end with either."""

    def build(drafter, **changes):
        decoder = Decoder(target, drafter, decode_settings(ignore_eos=False, **changes))
        monkeypatch.setattr(decoder, "_eos", frozenset(eos_ids))
        return decoder

    return build


def theirs(model, eos_ids, prompt, options):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=sorted(eos_ids),
        pad_token_id=0,
        **options,
    )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize(("law", "options"), CASES)
def test_answers_equal_those_of_transformers(target, model, prompts, eos_ids, ending, law, options):
    wanted = [theirs(model, eos_ids, prompt, options) for prompt in prompts]
    plain = [theirs(model, eos_ids, prompt, {}) for prompt in prompts]
    assert wanted != plain  # the processor did something
    knows = perfect({tuple(p): list(w) for p, w in zip(prompts, wanted, strict=True)})

    def mostly(prefix, depth):
        right = len(prefix) % 5
        return wrong_from(knows, right, target.spec.num_token_ids)(prefix, depth)

    for drafter in (None, Scripted(knows), Scripted(mostly)):
        answers = ending(drafter).generate(prompts, sampling=law, max_new_tokens=LENGTH)
        assert [a.output_ids for a in answers] == wanted


def test_a_penalty_that_does_not_see_ancestors_would_be_noticed(
    target, model, prompts, eos_ids, ending, monkeypatch
):
    law, options = CASES[0]
    wanted = [theirs(model, eos_ids, prompt, options) for prompt in prompts]
    knows = perfect({tuple(p): list(w) for p, w in zip(prompts, wanted, strict=True)})
    honest = ContextTracker.at

    def blind(self, rows, node_tokens=None, parents=None):
        root = honest(self, rows)
        if node_tokens is None:
            return root
        full = honest(self, rows, node_tokens, parents)
        object.__setattr__(full, "sees", torch.zeros_like(full.sees))
        return full

    monkeypatch.setattr(ContextTracker, "at", blind)
    answers = ending(Scripted(knows)).generate(prompts, sampling=law, max_new_tokens=LENGTH)
    assert [a.output_ids for a in answers] != wanted


def test_rows_of_other_laws_change_nothing(target, prompts, ending):
    laws = [law for law, _ in CASES] + [Sampling(), Sampling(frequency_penalty=0.7), Sampling()]
    together = ending(None).generate(
        prompts, sampling=laws, max_new_tokens=LENGTH, batch_size=len(prompts)
    )
    for index, law in enumerate(laws):
        alone = ending(None).generate([prompts[index]], sampling=law, max_new_tokens=LENGTH)
        assert together[index].output_ids == alone[0].output_ids
