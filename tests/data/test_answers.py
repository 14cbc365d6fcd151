import json
import threading

import pytest
import torch

from draftlab import files
from draftlab.data.answers import AnswerFeatures, AnswerRecord, ShardStore
from draftlab.data.packing import PackedRow, collate_features, cut_samples
from draftlab.errors import DataError


def record(name, prompt, answer, finish="eos"):
    turns = ({"role": "user", "content": f"天気 {name}"},)
    return AnswerRecord(name, "chat", turns, tuple(prompt), tuple(answer), finish, 0)


def features(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(length, 2, 4, generator=generator).bfloat16()
    return AnswerFeatures(taps, torch.randn(length, 4, generator=generator).bfloat16())


@pytest.fixture
def store(tmp_path):
    return ShardStore(tmp_path / "answers")


RECORDS = [record("a", [1, 2, 3], [4, 5]), record("b", [6], [7, 8, 9], "length")]


def test_answers_come_back_as_samples_that_learn_the_answer_only(store):
    store.write(3, RECORDS)
    samples = store.read()
    assert [sample.ids.tolist() for sample in samples] == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert [sample.mask.tolist() for sample in samples] == [
        [False, False, False, True, True],
        [False, True, True, True],
    ]
    assert list(store.read_records()) == RECORDS


def test_sample_ids_do_not_depend_on_which_other_shards_exist(store):
    store.write(3, RECORDS)
    alone = [sample.sample_id for sample in store.read()]
    store.write(0, RECORDS)
    assert [sample.sample_id for sample in store.read()][2:] == alone
    assert len({sample.sample_id for sample in store.read()}) == 4


def test_missing_shards_are_those_not_committed(store):
    assert store.missing(3) == [0, 1, 2]
    store.write(1, RECORDS)
    assert store.missing(3) == [0, 2]


def test_features_come_back_for_each_sample(store):
    captured = [features(5, 1), features(3, 2)]  # the second lacks the last token's rows
    store.write(0, RECORDS, captured)
    samples = store.read()
    taps, final = samples[0].load_features()
    assert torch.equal(taps, captured[0].taps)
    assert torch.equal(final, captured[0].final)
    taps, final = samples[1].load_features()
    assert torch.equal(taps[:3], captured[1].taps)
    assert not taps[3].any()
    assert final.shape == (4, 4)


def test_features_follow_a_packed_and_cut_sample(store):
    captured = [features(5, 1), features(4, 2)]
    store.write(0, RECORDS, captured)
    samples = cut_samples(store.read(), 4).samples
    taps, final = collate_features([PackedRow(tuple(samples)), PackedRow((samples[1],))], 10)
    assert taps.shape == (2, 10, 2, 4)
    assert torch.equal(taps[0, :8], torch.cat([captured[0].taps[:4], captured[1].taps]))
    assert torch.equal(final[1, :4], captured[1].final)
    assert not taps[0, 8:].any()


def test_only_the_final_state_can_be_captured(store):
    captured = [AnswerFeatures(None, features(5).final), AnswerFeatures(None, features(4).final)]
    store.write(0, RECORDS, captured)
    taps, final = collate_features([PackedRow(tuple(store.read()))])
    assert taps is None
    assert final.shape == (1, 9, 4)


def test_samples_with_and_without_features_do_not_share_a_batch(store):
    store.write(0, RECORDS, [features(5), features(4)])
    store.write(1, RECORDS, [AnswerFeatures(None, features(n).final) for n in (5, 4)])
    with pytest.raises(DataError, match="some have not"):
        collate_features([PackedRow(tuple(store.read()))])


def test_a_row_of_padding_gets_zeros(store):
    store.write(0, RECORDS, [features(5), features(4)])
    taps, final = collate_features([PackedRow(()), PackedRow(tuple(store.read()))])
    assert taps.shape == (2, 9, 2, 4)
    assert not taps[0].any()
    assert final[1].any()


@pytest.mark.parametrize("length", [3, 6])
def test_features_of_another_length_are_refused(store, length):
    with pytest.raises(DataError, match=f"prompt a has {length} rows for 5 tokens"):
        store.write(0, RECORDS, [features(length), features(4)])
    assert store.missing(1) == [0]


def test_a_shard_killed_before_its_last_rename_is_missing(store, monkeypatch):
    renames = []

    def stop(source, destination):
        renames.append(destination)
        if len(renames) == 2:
            raise KeyboardInterrupt
        os_replace(source, destination)

    os_replace = files.os.replace
    store.write(0, RECORDS, [features(5, 1), features(4, 2)])
    tensors = next(store.folder.glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-7])  # damaged, so it is written anew
    monkeypatch.setattr(files.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        store.write(0, RECORDS, [features(5, 3), features(4, 4)])
    monkeypatch.undo()
    assert store.missing(1) == [0]
    with pytest.raises(DataError, match="no finished shard"):
        store.read()


def test_a_whole_shard_is_never_taken_from_who_reads_it(store, monkeypatch):
    store.write(0, RECORDS, [features(5), features(4)])
    monkeypatch.setattr(files.os, "replace", lambda *names: pytest.fail(f"replaces {names}"))
    store.write(0, RECORDS, [features(5), features(4)])
    assert len(store.read()) == 2


def test_a_shard_gone_between_listing_and_reading_is_missing(store, monkeypatch):
    store.write(0, RECORDS)
    listed = list(store.folder.iterdir())
    listed[0].unlink()
    monkeypatch.setattr(type(store.folder), "iterdir", lambda folder: iter(listed))
    assert store.missing(1) == [0]


def test_a_second_writer_waits_for_the_first(store, caplog):
    order = []

    def write_too():
        with store.hold():
            order.append("second")

    second = threading.Thread(target=write_too)
    with caplog.at_level("INFO"), store.hold():
        second.start()
        second.join(timeout=0.5)
        assert second.is_alive()
        order.append("first")
    second.join(timeout=30)
    assert order == ["first", "second"]
    assert "waiting for it" in caplog.text


@pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
def test_a_shard_copied_in_part_is_missing(store, suffix):
    store.write(0, RECORDS, [features(5), features(4)])
    path = next(store.folder.glob(f"*.{suffix}"))
    path.write_bytes(path.read_bytes()[:-7])
    assert store.missing(1) == [0]


def test_writing_leaves_no_temporary_file(store):
    store.check_manifest({"target": "x"})
    store.write(0, RECORDS, [features(5), features(4)])
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "manifest.json",
        "shard-00000.jsonl",
        "shard-00000.safetensors",
    ]


def test_a_folder_begun_in_another_way_is_refused_by_key(store):
    store.check_manifest({"target": "abc", "sampling": {"temperature": 0.7}, "taps": (1, 2)})
    store.check_manifest({"target": "abc", "sampling": {"temperature": 0.7}, "taps": [1, 2]})
    with pytest.raises(
        DataError, match=r"sampling.*0\.7.*there.*1\.0.*now.*another folder"
    ) as caught:
        store.check_manifest({"target": "abc", "sampling": {"temperature": 1.0}, "taps": (1, 2)})
    assert "target" not in str(caught.value)
    assert json.loads((store.folder / "manifest.json").read_text())["taps"] == [1, 2]
