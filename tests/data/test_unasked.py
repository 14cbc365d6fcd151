from draftlab.data.conversations import Conversation
from draftlab.data.unasked import count_unasked, describe_unasked

USER, ASSISTANT = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}
TEXT = "rendered text, whose last question is not cut out"


def chat(name, *turns, text=None):
    return Conversation(name, "own", turns, source=f"own.jsonl:{name}", text=text)


def test_chats_that_cannot_be_asked_are_counted_by_reason():
    chats = [
        chat("1", USER, ASSISTANT),
        chat("2", text="a"),
        chat("3", ASSISTANT),
        chat("4", text="b"),
    ]
    assert count_unasked(chats) == {TEXT: 2, "no question": 1}


def test_chats_that_cannot_be_asked_are_named_with_what_to_do():
    chats = [chat("1", USER), *(chat(str(n), text="a") for n in range(2, 9))]
    first, *examples = describe_unasked(chats).splitlines()
    assert first == f"dropped 7: {TEXT}; give rendered text as `messages` or `prompt`"
    assert examples[0] == "  own.jsonl:2 (2)"
    assert len(examples) == 5


def test_nothing_is_said_where_every_chat_can_be_asked():
    assert describe_unasked([chat("1", USER)]) == ""
