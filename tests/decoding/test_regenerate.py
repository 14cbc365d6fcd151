import json

import pytest
import torch
from scripted import decode_settings

from draftlab.data.answers import ShardStore
from draftlab.data.batch import TokenBatch
from draftlab.data.conversations import Conversation
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.regenerate import list_questions, regenerate
from draftlab.decoding.settings import RegenerateSettings
from draftlab.errors import ConfigError, DataError
from draftlab.targets.features import FeatureRequest

NEEDS = FeatureRequest(tap_layers=(1, 3), wants_final=True)
MAX_TOKENS = 120


def chat(name, question, answer=None):
    turns = [{"role": "user", "content": question}]
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    return Conversation(name, "chat", tuple(turns))


CHATS = [
    chat("a", "Is it on?"),
    chat("b", "And now?", "an answer that is in the data"),
    chat("c", "天気は?"),
    chat("d", "Name a fruit that grows on trees and is not red."),
    chat("e", "No"),
]


def settings(**changes):
    values = {
        "answers_per_prompt": 1,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "max_new_tokens": 20,
        "batch_size": 2,
        "prompts_per_shard": 2,
        "capture_features": True,
        "features_dtype": "target",
    }
    return RegenerateSettings(**{**values, **changes})


def ask(target, chosen, chats=CHATS, max_tokens=MAX_TOKENS):
    return list_questions(target, chats, chosen, max_tokens=max_tokens)[0]


def answer(target, folder, chosen=None, *, chats=CHATS, max_tokens=MAX_TOKENS, seed=0, **hooks):
    chosen = chosen or settings()
    store = ShardStore(folder)
    questions = ask(target, chosen, chats, max_tokens)
    regenerate(
        target,
        questions,
        chosen,
        store,
        needs=NEEDS,
        seed=seed,
        max_tokens=max_tokens,
        **hooks,
    )
    return store


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def unbroken(target, tmp_path_factory):
    return answer(target, tmp_path_factory.mktemp("unbroken"))


def test_answers_are_those_of_plain_decoding(target, unbroken):
    records = list(unbroken.read_records())
    assert [record.prompt_id for record in records] == ["a", "b", "c", "d", "e"]
    decoder = Decoder(target, None, decode_settings(ignore_eos=False))
    for record in records:
        (alone,) = decoder.generate([record.prompt_ids], max_new_tokens=20)
        assert record.answer_ids == alone.output_ids
        assert record.finish == alone.finish


def test_the_answer_in_the_data_is_not_shown_to_the_target(target, unbroken):
    (record,) = [record for record in unbroken.read_records() if record.prompt_id == "b"]
    assert [message["role"] for message in record.messages] == ["user"]
    text = target.tokenizer.decode(record.prompt_ids)
    assert text == "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


def test_captured_features_are_those_of_a_training_pass(target, unbroken):
    for sample in unbroken.read():
        taps, final = sample.load_features()
        length = len(sample)
        batch = TokenBatch(
            input_ids=sample.ids.unsqueeze(0),
            loss_mask=sample.mask.unsqueeze(0),
            positions=torch.arange(length).unsqueeze(0),
            segment_ids=torch.zeros(1, length, dtype=torch.int64),
            sample_ids=torch.full((1, length), sample.sample_id),
        )
        seen = target.read_features(batch, NEEDS)
        # the last token was written, never read
        torch.testing.assert_close(taps[:-1], seen.taps[0, :-1], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(final[:-1], seen.final[0, :-1], rtol=1e-9, atol=1e-9)
        assert not taps[-1].any()


def test_features_are_captured_only_where_asked(target, tmp_path):
    store = answer(target, tmp_path, settings(capture_features=False))
    assert not list(tmp_path.glob("*.safetensors"))
    assert all(sample.features_path is None for sample in store.read())


def test_a_run_that_dies_in_a_shard_goes_on_to_the_same_bytes(target, unbroken, tmp_path):
    count = 0

    def die(_):
        nonlocal count
        count += 1
        if count == 4:
            raise MemoryError

    with pytest.raises(MemoryError):
        answer(target, tmp_path, on_answer=die)
    store = ShardStore(tmp_path)
    assert store.missing(3) == [1, 2]
    answered = []
    answer(target, tmp_path, on_answer=answered.append)
    assert len(answered) == 3  # the first shard was kept
    assert contents(tmp_path) == contents(unbroken.folder)


@pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
def test_a_torn_shard_is_run_again_to_the_same_bytes(target, unbroken, tmp_path, suffix):
    for name, data in contents(unbroken.folder).items():
        is_torn = name == f"shard-00001.{suffix}"
        (tmp_path / name).write_bytes(data[: len(data) // 2] if is_torn else data)
    answered = []
    answer(target, tmp_path, on_answer=answered.append)
    assert len(answered) == 2
    assert contents(tmp_path) == contents(unbroken.folder)


def test_the_caller_can_stop_after_a_shard(target, unbroken, tmp_path):
    calls = []

    def stop(done, total):
        calls.append((done, total))
        return done < 2

    store = answer(target, tmp_path, on_shard=stop)
    assert calls == [(1, 3), (2, 3)]
    assert store.missing(3) == [2]
    answer(target, tmp_path)
    assert contents(tmp_path) == contents(unbroken.folder)


def sampled_answers(target, folder, **changes):
    chosen = settings(**{"answers_per_prompt": 3, "temperature": 1.0, **changes})
    records = answer(target, folder, chosen, seed=7).read_records()
    return {(record.prompt_id, record.sample_index): record.answer_ids for record in records}


@pytest.fixture(scope="module")
def sampled(target, tmp_path_factory):
    return sampled_answers(target, tmp_path_factory.mktemp("sampled"))


def test_several_answers_to_a_prompt_differ(sampled):
    assert len(sampled) == 3 * len(CHATS)
    for one in CHATS:
        assert len({sampled[one.id, index] for index in range(3)}) == 3


@pytest.mark.parametrize("changes", [{"batch_size": 5}, {"prompts_per_shard": 15}])
def test_a_drawn_answer_depends_on_prompt_and_sample_alone(target, tmp_path, sampled, changes):
    assert sampled_answers(target, tmp_path, **changes) == sampled


def test_every_prompt_is_answered_once_before_any_is_answered_again(target):
    questions = ask(target, settings(answers_per_prompt=2, temperature=0.7))
    assert [question.sample_index for question in questions] == [0] * 5 + [1] * 5


def test_equal_greedy_answers_are_refused(target):
    with pytest.raises(ConfigError, match=r"answers_per_prompt=2 at temperature 0.*temperature="):
        ask(target, settings(answers_per_prompt=2))


def test_prompts_without_room_are_left_out_and_counted(target):
    chats = [*CHATS, chat("long", "x" * MAX_TOKENS)]
    questions, num_too_long = list_questions(target, chats, settings(), max_tokens=MAX_TOKENS)
    assert [question.prompt_id for question in questions] == ["a", "b", "c", "d", "e"]
    assert num_too_long == 1


def test_a_chat_without_a_question_is_left_out(target):
    turns = ({"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hi."})
    questions = ask(target, settings(), [Conversation("s", "chat", turns), CHATS[0]])
    assert [question.prompt_id for question in questions] == ["a"]


def test_every_prompt_that_the_template_refuses_is_named(target, monkeypatch):
    template = (
        "{%- for message in messages %}{%- if 'no' in message.content %}"
        "{{- raise_exception('not this') }}{%- endif %}{{- message.content }}{%- endfor %}"
    )
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    chats = [chat("good", "yes"), chat("bad", "no"), chat("worse", "no no")]
    with pytest.raises(DataError, match=r"(?s)2 of 3 prompts.*bad: .*not this.*worse: "):
        ask(target, settings(), chats)


def test_no_question_at_all_is_refused(target):
    with pytest.raises(DataError, match=r"none of 1 conversations.*data\.max_tokens=10"):
        ask(target, settings(), [CHATS[0]], max_tokens=10)


def test_conversations_that_cannot_be_asked_are_no_matter_of_room(target):
    chats = [Conversation("t", "chat", (), text="rendered")]
    with pytest.raises(DataError, match=r"left out before: rendered text, .* not cut out \(1\)$"):
        ask(target, settings(), chats)


def test_each_answer_has_the_room_its_own_prompt_leaves(target, tmp_path):
    long = chat("long", "x" * 60)
    chosen = settings(max_new_tokens=60, prompts_per_shard=2)
    store = answer(target, tmp_path, chosen, chats=[CHATS[0], long], max_tokens=110)
    first, second = store.read_records()
    decoder = Decoder(target, None, decode_settings(ignore_eos=False))
    plain, cut = decoder.generate([first.prompt_ids, second.prompt_ids], max_new_tokens=60)
    assert len(plain.output_ids) > 110 - len(second.prompt_ids)  # else this shows nothing
    assert first.answer_ids == plain.output_ids
    assert second.num_tokens == 110
    assert second.answer_ids == cut.output_ids[: len(second.answer_ids)]
    assert second.finish == "length"
    assert len(store.read()) == 2


@pytest.mark.parametrize(
    ("changes", "seed", "named"),
    [
        ({"max_new_tokens": 21}, 0, r"settings\.max_new_tokens: 20 there, 21 now"),
        ({}, 1, "seed: 0 there, 1 now"),
    ],
)
def test_answers_made_in_another_way_are_refused_by_name(
    target, unbroken, tmp_path, changes, seed, named
):
    (tmp_path / "manifest.json").write_bytes((unbroken.folder / "manifest.json").read_bytes())
    with pytest.raises(DataError, match=named):
        answer(target, tmp_path, settings(**changes), seed=seed)
    assert ShardStore(tmp_path).list_shards() == []


def test_other_prompts_are_refused(target, unbroken, tmp_path):
    (tmp_path / "manifest.json").write_bytes((unbroken.folder / "manifest.json").read_bytes())
    with pytest.raises(DataError, match="prompts_sha256"):
        answer(target, tmp_path, chats=CHATS[:4])


def test_the_manifest_says_what_the_answers_depend_on(target, unbroken):
    manifest = json.loads((unbroken.folder / "manifest.json").read_text())
    assert manifest["target_checksum"] == target.spec.checksum
    assert manifest["tokenizer_sha256"] == target.spec.tokenizer_sha256
    assert manifest["features"] == {"tap_layers": [1, 3], "wants_final": True}
