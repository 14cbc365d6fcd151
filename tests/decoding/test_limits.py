"""Edges of memory and time: the context's end, full batches with refill, long prompts, long runs."""

import gc

import pytest
import torch
from scripted import Scripted, ScriptedTree, decode_settings, perfect, wrong_from

from draftlab.decoding.decoder import Decoder
from draftlab.drafters.base import drafter_class
from draftlab.targets.target import build_target
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

MOST = 48  # positions of the short target


def small_target(family="llama", **sizes):
    sizes = {"num_hidden_layers": 2, **sizes}
    model = build_tiny_model(family, **sizes)
    return build_target(model, tiny_tokenizer(), name=f"small-{family}", source="tiny")


def outputs(generations):
    return [g.output_ids for g in generations]


def scripts(prompts, answers):
    return perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, answers, strict=True)})


def test_every_prompt_length_near_the_contexts_end_is_exact():
    target = small_target(max_position_embeddings=MOST)
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in range(MOST - 12, MOST)]
    settings = decode_settings(max_new_tokens=100, prefill_tokens=64)
    plain = Decoder(target, None, settings).generate(prompts, batch_size=4)
    assert [len(g.output_ids) for g in plain] == [MOST - len(p) for p in prompts]
    knows = scripts(prompts, plain)
    for right, depth in ((0, 6), (3, 6), (6, 6)):
        drafter = Scripted(wrong_from(knows, right, 250), depth)
        assert outputs(Decoder(target, drafter, settings).generate(prompts, batch_size=5)) == (
            outputs(plain)
        )

    def branch(prefix, depth):
        true = [*knows(prefix, 3), 0, 0, 0]
        return [(3, -1, 0.5), (true[0], -1, 0.5), (true[1], 1, 0.5), (5, 1, 0.5), (true[2], 2, 0.5)]

    tree = {"kind": "dynamic", "num_nodes": 5, "top_k": 2, "depth": 3}
    decoder = Decoder(target, ScriptedTree(branch), decode_settings(max_new_tokens=100, tree=tree))
    assert outputs(decoder.generate(prompts, batch_size=5)) == outputs(plain)


def test_a_batch_of_64_with_refill_equals_rows_alone():
    target = small_target()
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, 256, (1 + n % 17,), generator=generator).tolist() for n in range(90)
    ]
    limits = [1 + n * 5 % 11 for n in range(90)]
    settings = decode_settings(prefill_tokens=256)
    plain = Decoder(target, None, settings).generate(prompts, max_new_tokens=limits, batch_size=16)
    drafter = Scripted(wrong_from(scripts(prompts, plain), 2, 250))
    got = Decoder(target, drafter, settings).generate(prompts, max_new_tokens=limits, batch_size=64)
    assert outputs(got) == outputs(plain)
    few = Decoder(target, None, settings)
    for i in (0, 63, 89):
        (alone,) = few.generate([prompts[i]], max_new_tokens=limits[i])
        assert alone.output_ids == plain[i].output_ids


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_prompts_of_8k_are_exact_in_chunks_with_full_and_sliding_attention(family):
    target = small_target(family, max_position_embeddings=9000, num_hidden_layers=2)
    prompts = [[(i * i + 3 * i) % 251 for i in range(n)] for n in (8300, 8191, 40)]
    settings = decode_settings(max_new_tokens=6, prefill_tokens=1024)
    plain = Decoder(target, None, settings).generate(prompts, batch_size=1)
    ids = torch.tensor([[*prompts[0], *plain[0].output_ids]])[:, :-1]
    whole = target.forward_plainly(ids).logits[0, len(prompts[0]) - 1 :]
    assert tuple(whole.argmax(-1).tolist()) == plain[0].output_ids
    drafter = Scripted(wrong_from(scripts(prompts, plain), 2, 250))
    for chunk in (512, 3000):
        settings = decode_settings(max_new_tokens=6, prefill_tokens=chunk)
        got = Decoder(target, drafter, settings).generate(prompts, batch_size=3)
        assert outputs(got) == outputs(plain)


def live_tensors():
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return len(found), sum(x.untyped_storage().nbytes() for x in found)


@pytest.mark.slow
def test_2000_steps_hold_as_many_tensors_as_20():
    target = small_target(num_hidden_layers=1, max_position_embeddings=2100)
    ngram = drafter_class("ngram")
    drafter = ngram(
        ngram.settings_class(kind="ngram", num_draft_tokens=2, max_ngram=4, min_ngram=4),
        target.view,
    )
    seen = []
    for fallback, temperature in ((False, 1.5), (True, 1.5)):
        settings = decode_settings(
            fallback=fallback, temperature=temperature, rule="sampled_verify", max_new_tokens=2000
        )
        rounds = 0

        def count(*_):
            nonlocal rounds
            rounds += 1
            if rounds in (20, 1990):
                seen.append(live_tensors())

        Decoder(target, drafter, settings).generate([[1, 2, 3]], on_tokens=count)
        early, late = seen[-2:]
        # what a resting drafter has not been shown yet may come and go
        assert late[0] <= early[0] + 4 * 64
        assert late[1] <= early[1] + 64 * 1024


def test_2000_tokens_hold_as_many_tensors_as_20_when_drafting_is_perfect():
    target = tiny_target(max_position_embeddings=2100, num_hidden_layers=1, vocab_size=261)
    answer = [i % 250 for i in range(3000)]
    drafter = Scripted(lambda prefix, depth: answer[:depth], 24)
    drafter.seen = type("Nothing", (), {"append": lambda *_: None})()
    lossy = {"rule": "threshold", "lossy": True, "lossy_threshold": 1e-9, "temperature": 9.0}
    seen, rounds = [], 0

    def count(*_):
        nonlocal rounds
        rounds += 1
        if rounds in (5, 75):
            seen.append(live_tensors())

    Decoder(target, drafter, decode_settings(**lossy)).generate(
        [[1, 2, 3]], max_new_tokens=2000, on_tokens=count
    )
    assert seen[0] == seen[1]
