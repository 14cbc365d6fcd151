import gzip
import json

import pytest

from draftlab.data.conversations import (
    Conversation,
    list_files,
    read_files,
    read_hub,
    to_prompt,
)
from draftlab.errors import DataError


def read(path, cache_dir, on_bad_line="fail", **more):
    return read_files([path], domain="own", on_bad_line=on_bad_line, cache_dir=cache_dir, **more)


def test_every_bad_line_is_named_with_its_physical_number_before_any_work(
    cases, tmp_path, expected_of
):
    with pytest.raises(DataError) as caught:
        read(cases / "malformed.jsonl", tmp_path)
    text = str(caught.value)
    assert "5 bad lines" in text
    reasons = {"json": "not JSON", "no chat field": "no chat field (fields: id, text)",
               "messages not a list": "messages is not a list but text"}  # fmt: skip
    for number, reason in expected_of("malformed.expected.json")["bad_lines"].items():
        assert f"malformed.jsonl:{number}: {reasons.get(reason, reason)}" in text
    assert "data.on_bad_line=skip" in text


def test_skipping_bad_lines_keeps_the_others_and_reports_each(cases, tmp_path, expected_of):
    expected = expected_of("malformed.expected.json")
    reading = read(cases / "malformed.jsonl", tmp_path, on_bad_line="skip")
    assert [chat.id for chat in reading.conversations] == expected["kept_ids"]
    assert [str(bad.line) for bad in reading.bad_lines] == list(expected["bad_lines"])
    assert reading.conversations[0].source == "malformed.jsonl:1"


def test_many_bad_lines_are_listed_up_to_fifty_and_then_counted(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("{\n" * 73, encoding="utf-8")
    with pytest.raises(DataError, match=r"73 bad lines(.|\n)*many.jsonl:50:(.|\n)*and 23 more"):
        read(path, tmp_path)


def test_text_in_another_encoding_is_told_by_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    good = json.dumps({"prompt": "fine"}).encode()
    path.write_bytes(good + b"\n" + '{"prompt": "caf\xe9"}'.encode("latin-1") + b"\n" + good)
    reading = read(path, tmp_path, on_bad_line="skip")
    assert [str(bad) for bad in reading.bad_lines] == ["latin.jsonl:2: not UTF-8 at byte 16"]
    assert len(reading.conversations) == 2


def test_utf16_is_refused_by_name(tmp_path):
    path = tmp_path / "wide.jsonl"
    path.write_text('{"prompt": "x"}', encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16"):
        read(path, tmp_path)


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path):
    path = tmp_path / "separators.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    chats = read(path, tmp_path).conversations
    assert [chat.messages[0]["content"] for chat in chats] == ["a\u2028b\x85c"]


def test_half_a_surrogate_pair_is_a_bad_line(tmp_path):
    path = tmp_path / "half.jsonl"
    path.write_text('{"prompt": "\\ud83d"}', encoding="utf-8")
    with pytest.raises(DataError, match="half of a surrogate pair"):
        read(path, tmp_path)


def test_sharegpt_records_keep_all_turns_and_their_system_text(cases, tmp_path, expected_of):
    expected = expected_of("sharegpt_multi.expected.json")
    chats = {c.id: c for c in read(cases / "sharegpt_multi.jsonl", tmp_path).conversations}
    for id_, count in expected["turns_kept"].items():
        assert len(chats[id_].messages) == count
        answers = [m["content"] for m in chats[id_].messages if m["role"] == "assistant"]
        assert answers == expected["assistant_texts"][id_]
    assert chats["s1"].messages[0] == {
        "role": "system",
        "content": "You answer for the Larkfield pump desk.",
    }


def test_tool_arguments_keep_their_types(cases, tmp_path):
    chats = {c.id: c for c in read(cases / "toolcalls_mixed.jsonl", tmp_path).conversations}
    assert len(chats) == 4
    arguments = [
        chats[id_].messages[1]["tool_calls"][0]["function"]["arguments"] for id_ in ("t1", "t2")
    ]
    assert arguments == [
        {"bin": "A4", "when": "2026-05-01"},
        {"bin": 4, "when": 1777600000},
    ]
    assert chats["t1"].messages[1]["content"] == ""
    assert chats["t1"].tools[0]["function"]["name"] == "stock_at"
    assert chats["t4"].tools is None


@pytest.mark.parametrize("name", ["list.json", "list.JSON"])
def test_a_json_list_is_read_as_rows(tmp_path, name):
    path = tmp_path / name
    path.write_text(json.dumps([{"prompt": "a"}, {"promt": "b"}]), encoding="utf-8")
    with pytest.raises(DataError, match=rf"{name}:2: no chat field \(fields: promt\)"):
        read(path, tmp_path)


def test_parquet_gives_the_same_conversations_as_jsonl(tmp_path):
    from datasets import Dataset

    rows = [
        {
            "id": "p1",
            "messages": [
                {"role": "user", "content": "天気は？"},
                {"role": "assistant", "content": "晴れ"},
            ],
        },
        {"id": "p2", "messages": [{"role": "user", "content": "hi"}]},
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    chats = read(tmp_path / "rows.parquet", tmp_path / "cache").conversations
    assert [list(chat.messages) for chat in chats] == [row["messages"] for row in rows]
    assert chats[1].source == "rows.parquet:2"
    assert any((tmp_path / "cache" / "datasets").iterdir())


def test_a_data_set_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot load .*no_such_folder"):
        read_hub(
            str(tmp_path / "no_such_folder"), subset=None, split="train", domain="d",
            on_bad_line="fail", cache_dir=tmp_path,
        )  # fmt: skip


def test_a_data_set_is_read_by_name_and_split(tmp_path):
    source = tmp_path / "set"
    source.mkdir()
    (source / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    reading = read_hub(
        str(source), subset=None, split="train", domain="d", on_bad_line="fail",
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    assert [chat.messages[0]["content"] for chat in reading.conversations] == ["a", "b"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.jsonl does not exist"):
        list_files([tmp_path / "nowhere.jsonl"])


def test_a_folder_stands_for_its_data_files_in_name_order(tmp_path):
    for name in ("b.jsonl", "a.json", "notes.txt", "C.JSONL"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert [path.name for path in list_files([tmp_path])] == ["C.JSONL", "a.json", "b.jsonl"]


def test_a_folder_without_data_files_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        list_files([tmp_path])


def test_a_prompt_to_answer_ends_before_the_last_answer():
    turns = [{"role": r, "content": r} for r in ("user", "assistant", "user", "assistant")]
    chat = Conversation("c", "d", tuple(turns))
    prompt = to_prompt(chat)
    assert prompt is not None
    assert prompt.messages == tuple(turns[:3])
    assert to_prompt(Conversation("c", "d", ({"role": "system", "content": "s"},))) is None


def test_a_compressed_file_is_told_and_how_to_unpack_it(tmp_path):
    path = tmp_path / "two words.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(DataError, match=r"compressed by gzip.*gunzip -k '.*two words\.jsonl\.gz'"):
        read(path, tmp_path)


def test_a_text_without_an_end_is_told_once_where_it_starts(tmp_path):
    path = tmp_path / "torn.jsonl"
    path.write_text('{"messages": "Hi')
    with pytest.raises(DataError, match=r"Unterminated string starting at column 14"):
        read(path, tmp_path)


def test_a_setting_is_advised_only_where_there_is_one(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("[1]")
    with pytest.raises(DataError) as caught:
        read(path, tmp_path, on_bad_line=None)
    assert "on_bad_line" not in str(caught.value)
    assert "repair them, or take them out" in str(caught.value)
