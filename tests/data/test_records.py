import json

import pytest

from draftlab.data.records import parse_record


def parse(**record):
    return parse_record(record, source="f:1", domain="own")


def test_ids_and_domains_default_to_the_line_and_the_settings():
    assert parse(prompt="q").id == "f:1"
    assert parse(prompt="q").domain == "own"
    named = parse(id=7, domain="code", prompt="q")
    assert (named.id, named.domain) == ("7", "code")


def test_a_prompt_with_its_completion_is_a_chat():
    chat = parse(prompt="q", completion=[{"role": "assistant", "content": "a"}])
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("alias", "role"),
    [("human", "user"), ("GPT", "assistant"), ("observation", "tool"), ("developer", "system")],
)
def test_alias_roles_are_known(alias, role):
    assert parse(conversations=[{"from": alias, "value": "x"}]).messages[0]["role"] == role


def test_a_system_field_joins_a_system_turn():
    chat = parse(system="A", messages=[{"role": "system", "content": "B"}])
    assert chat.messages == ({"role": "system", "content": "A\n\nB"},)


def test_a_function_call_turn_becomes_a_tool_call():
    value = json.dumps({"name": "f", "arguments": {"n": 4}})
    message = parse(conversations=[{"from": "function_call", "value": value}]).messages[0]
    assert message["role"] == "assistant"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"n": 4}}


def test_an_inline_thought_is_taken_apart():
    content = "<think>\nadd\n</think>\n\nFour."
    message = parse(messages=[{"role": "assistant", "content": content}]).messages[0]
    assert message == {"role": "assistant", "content": "Four.", "reasoning_content": "add"}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": ["hi"]}, "turn 1 is not an object but text"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "turn 1 has role 'wizard'"),
        ({"messages": [{"role": "user", "content": 4}]}, "content of a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"\['image'\]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "no function name"),
        ({"prompt": 3}, "prompt is a number"),
        ({"prompt": "x", "tools": "{"}, "tools is text but not JSON"),
        ({"prompt": "x", "domain": 3}, "domain is a number"),
    ],
)
def test_what_is_no_chat_says_why(record, reason):
    with pytest.raises(ValueError, match=reason):
        parse_record(record, source="f:1", domain="own")


def test_text_is_read_only_where_it_is_a_rendered_chat():
    record = {"text": "<mark>\nx"}
    chat = parse_record(record, source="f:1", domain="own", find_opening=lambda: "<mark>\n")
    assert (chat.text, chat.messages) == ("<mark>\nx", ())


@pytest.mark.parametrize(
    ("text", "opening", "reason"),
    [
        ("<other>x", "<mark>\n", r"the answer marker of the target's chat template, '<mark>\\n'$"),
        ("<mark>x", None, "opens answers by no special token; give messages or prompt$"),
        (5, "<mark>", "text is a number, expected a string$"),
        (None, "<mark>", "text is null, expected a string$"),
        (["a"], "<mark>", "text is a list, expected a string$"),
    ],
)
def test_text_that_is_no_rendered_chat_says_what_was_looked_for(text, opening, reason):
    with pytest.raises(ValueError, match=reason):
        parse_record({"text": text}, source="f:1", domain="own", find_opening=lambda: opening)


def test_text_is_refused_where_only_prompts_are_of_use():
    with pytest.raises(ValueError, match=r"text cannot be asked.*; give messages or prompt$"):
        parse(text="<mark>x")
    with pytest.raises(
        ValueError, match=r"\(fields: q\); expected messages, conversations or prompt$"
    ):
        parse(q="x")
