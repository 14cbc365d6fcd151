import pytest

from draftlab.data.plain_text import encode_plain_prompt
from draftlab.data.template import RowProblem
from draftlab.targets.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = None
    return made


def text_of(tokenizer, *turns, **rest):
    messages = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.decode(encode_plain_prompt(tokenizer, messages, **rest))


@pytest.mark.parametrize("text", ["Is it on?", " two  spaces \n", "日本"])
def test_a_single_question_is_read_as_it_was_typed(tokenizer, text):
    assert text_of(tokenizer, ("user", text)) == text


def test_turns_follow_each_other_and_roles_are_not_written(tokenizer):
    turns = ("system", "Be short."), ("user", "Hi?"), ("assistant", "Ho."), ("user", "And?")
    assert text_of(tokenizer, *turns) == "Be short.\n\nHi?\n\nHo.\n\nAnd?"
    assert text_of(tokenizer, ("system", ""), ("user", "Hi?")) == "Hi?"


def test_the_tokenizer_adds_its_end_token(tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    own = tiny_tokenizer()
    end = own.eos_token_id
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    ids = encode_plain_prompt(own, [{"role": "user", "content": "ab"}])
    assert ids == [*encode_plain_prompt(tokenizer, [{"role": "user", "content": "ab"}]), end]


@pytest.mark.parametrize(
    ("turns", "rest", "message"),
    [
        ([("user", "  ")], {}, "empty chat"),
        ([], {}, "empty chat"),
        ([("user", "Hi")], {"tools": [{"type": "function"}]}, "tools and their calls cannot"),
        ([("user", "Hi"), ("tool", "3")], {}, "tools and their calls cannot"),
        ([("user", "Hi")], {"options": {"thinking": False}}, "so thinking would have no effect"),
    ],
)
def test_what_only_a_template_could_write_is_refused(tokenizer, turns, rest, message):
    with pytest.raises(RowProblem, match=message):
        text_of(tokenizer, *turns, **rest)
