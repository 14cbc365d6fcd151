"""Answers through transformers alone: equal to ours where both work, and there where ours refuses."""

import pytest
import torch
from scripted import decode_settings

from draftlab.data.answers import ShardStore
from draftlab.data.conversations import Conversation
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.plain import TransformersDecoding
from draftlab.decoding.regenerate import list_questions, regenerate
from draftlab.decoding.settings import RegenerateSettings
from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.targets.features import FeatureRequest
from draftlab.targets.tiny import tiny_target


def test_greedy_answers_equal_the_decoders_and_leave_its_attention_in_place(target, prompts):
    settings = decode_settings(ignore_eos=False, max_new_tokens=12)
    ours = Decoder(target, None, settings).generate(prompts[:4])
    plain = TransformersDecoding(target, settings).generate(prompts[:4])
    assert [g.output_ids for g in plain] == [g.output_ids for g in ours]
    again = Decoder(target, None, settings).generate(prompts[:4])
    assert [g.output_ids for g in again] == [g.output_ids for g in ours]


def test_sampled_answers_hang_on_their_key_and_not_on_their_place(target, prompts):
    settings = decode_settings(temperature=1.0, max_new_tokens=12, seed=5)
    plain = TransformersDecoding(target, settings)
    first = plain.generate(prompts[:2], row_keys=[70, 80])
    turned = plain.generate(prompts[1::-1], row_keys=[80, 70])
    assert [g.output_ids for g in first] == [g.output_ids for g in turned[::-1]]
    other = plain.generate(prompts[:1], row_keys=[71])
    assert other[0].output_ids != first[0].output_ids


def test_penalties_biases_and_a_least_length_equal_the_decoders(target, prompts):
    plain = Decoder(target, None, decode_settings(max_new_tokens=10)).generate(prompts[:3])
    banned = plain[0].output_ids[0]
    settings = decode_settings(
        max_new_tokens=10,
        min_new_tokens=6,
        repetition_penalty=1.3,
        logit_bias={banned: float("-inf"), 7: 1.5, **dict.fromkeys(target.spec.eos_ids, 3.0)},
    )
    ours = Decoder(target, None, settings).generate(prompts[:3])
    theirs = TransformersDecoding(target, settings).generate(prompts[:3])
    assert [g.output_ids for g in theirs] == [g.output_ids for g in ours]
    assert ours[0].output_ids != plain[0].output_ids
    assert all(len(g.output_ids) >= 6 for g in theirs)


@pytest.mark.parametrize("lookup", [None, 10])
def test_end_tokens_are_gone_past_where_the_decoder_goes_past_them(target, prompts, lookup):
    bias = dict.fromkeys(target.spec.eos_ids, 4.0)
    settings = decode_settings(ignore_eos=True, max_new_tokens=20, logit_bias=bias)
    ours = Decoder(target, None, settings).generate(prompts[:4])
    assert any(set(g.output_ids[:-1]) & set(target.spec.eos_ids) for g in ours)
    theirs = TransformersDecoding(target, settings, prompt_lookup=lookup).generate(prompts[:4])
    assert [g.output_ids for g in theirs] == [g.output_ids for g in ours]
    assert {g.finish for g in theirs} == {"length"}


@pytest.mark.parametrize(
    "changes", [{"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"stop": ["x"]}]
)
def test_what_transformers_cannot_do_is_refused(target, changes):
    with pytest.raises(ConfigError, match="cannot take effect"):
        TransformersDecoding(target, decode_settings(**changes))


@pytest.fixture(scope="module")
def refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return tiny_target("llama", rope_parameters=rope)


def test_a_refused_target_still_answers_training_prompts_without_captured_features(
    refused, tmp_path
):
    assert refused.speculation_refusal is not None
    with pytest.raises(UnsupportedTarget, match="dynamic"):
        Decoder(refused, None, decode_settings())
    settings = RegenerateSettings(
        answers_per_prompt=1,
        temperature=0.0,
        top_k=None,
        top_p=None,
        min_p=None,
        max_new_tokens=8,
        batch_size=4,
        prompts_per_shard=2,
        capture_features=False,
        features_dtype="target",
    )
    chats = [
        Conversation(f"c{i}", "chat", ({"role": "user", "content": text},))
        for i, text in enumerate(("hello", "two", "three!"))
    ]
    questions, _ = list_questions(refused, chats, settings, max_tokens=256)
    store = ShardStore(tmp_path)
    regenerate(
        refused, questions, settings, store, needs=FeatureRequest((1,)), seed=0, max_tokens=256
    )
    samples = store.read()
    assert len(samples) == 3
    assert all(sample.features_path is None for sample in samples)
    for record in store.read_records():
        ids = list(record.prompt_ids)
        for token in record.answer_ids:
            logits = refused.forward_plainly(torch.tensor([ids])).logits
            assert int(logits[0, -1].argmax()) == token
            ids.append(token)
