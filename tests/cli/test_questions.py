"""What `draftlab generate` is asked, from words, files and stdin."""

import io
import json

import pytest

from draftlab.cli.questions import read_questions
from draftlab.errors import ConfigError, DataError


def asked(questions):
    return [(q.title, [m["role"] for m in q.messages]) for q in questions]


def test_a_prompt_is_one_question_as_it_stands(tmp_path):
    (question,) = read_questions("two\nlines", None, tmp_path)
    assert question.messages == ({"role": "user", "content": "two\nlines"},)


def test_a_text_file_holds_one_question_a_line(tmp_path):
    path = tmp_path / "my questions (1).txt"
    path.write_text("What?\n\n  日本の首都は？ \n", encoding="utf-8")
    found = read_questions(None, str(path), tmp_path)
    assert asked(found) == [("What?", ["user"]), ("日本の首都は？", ["user"])]
    assert [q.place for q in found] == ["my questions (1).txt:1", "my questions (1).txt:3"]


def test_a_text_is_parted_at_newlines_alone_and_its_mark_of_order_is_dropped(tmp_path, monkeypatch):
    text = "\ufeffWhat?\r\nSum up: one\x0ctwo\nQuote: a\u2028b\x85c\nlast"
    titles = ["What?", "Sum up: one\x0ctwo", "Quote: a\u2028b\x85c", "last"]
    path = tmp_path / "q.txt"
    path.write_bytes(text.encode())
    found = read_questions(None, str(path), tmp_path)
    assert [q.title for q in found] == titles
    assert [q.place for q in found] == [f"q.txt:{number}" for number in range(1, 5)]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert [q.title for q in read_questions(None, "-", tmp_path)] == titles
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffone\ntwo\n"))
    assert [q.title for q in read_questions("-", None, tmp_path)] == ["one\ntwo"]


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.JSONL"])
def test_a_file_of_chats_is_asked_for_the_next_turn(tmp_path, name):
    path = tmp_path / name
    turns = [("system", "Be brief."), ("user", "Hi?"), ("assistant", "Ho."), ("user", "And?")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    path.write_text(f'{json.dumps(chat)}\n{{"prompt": "Why?"}}\n')
    found = read_questions(None, str(path), tmp_path)
    assert asked(found) == [("And?", ["system", "user", "assistant", "user"]), ("Why?", ["user"])]
    assert [q.place for q in found] == [f"{name}:1", f"{name}:2"]


def test_stdin_is_many_questions_or_a_whole_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert [q.title for q in read_questions(None, "-", tmp_path)] == ["one", "two"]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert [q.title for q in read_questions("-", None, tmp_path)] == ["one\ntwo"]


@pytest.mark.parametrize(
    ("prompt", "prompts", "words"),
    [
        (None, None, 'either prompt="..." or prompts=FILE'),
        ("a", "b.txt", "not both prompt='a' and prompts=b.txt"),
        ("", None, "the prompt is empty"),
        (None, "no such.txt", "cannot read prompts=no such.txt"),
        (None, "no such.jsonl", "prompts=no such.jsonl does not exist"),
    ],
)
def test_nothing_to_ask_is_an_error(prompt, prompts, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        read_questions(prompt, prompts, tmp_path)


def test_a_file_without_a_question_is_an_error(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="asks nothing"):
        read_questions(None, str(path), tmp_path)


def test_bad_lines_of_chats_are_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "Hi?"}\n[1]\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        read_questions(None, str(path), tmp_path)


def test_chats_without_a_question_are_named(tmp_path, caplog):
    path = tmp_path / "chats.jsonl"
    chats = [[{"role": "system", "content": "Be kind."}], [{"role": "user", "content": "Hi?"}]]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    assert asked(read_questions(None, str(path), tmp_path)) == [("Hi?", ["user"])]
    assert "dropped 1: no question" in caplog.text
    assert "chats.jsonl:1" in caplog.text
