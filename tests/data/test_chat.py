import copy
import json

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from draftlab.data.chat import check_template, encode_chat, encode_prompt
from draftlab.data.conversations import Conversation, parse_record
from draftlab.data.template import (
    RowProblem,
    compute_tokenizer_fingerprint,
    encode_text,
    find_answer_marker,
)
from draftlab.errors import DataError

MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- (m.content or '') + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- (m.content or '') + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "(m.content or '') + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}",
    "(m.content or '') }}{% endgeneration %}{{- '<|im_end|>\n' }}",
)
MARKED_WITHOUT_PROMPT = MARKED.replace(
    "'<|im_start|>assistant\n' }}{%- endif %}", "'' }}{%- endif %}"
)
PREFILLED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)


def chat(*turns, **fields):
    messages = [{"role": role, "content": content} for role, content in turns]
    return parse_record({"messages": messages, **fields}, source="c", domain="d")


@pytest.mark.parametrize(
    ("name", "tokenizer_name"),
    [
        ("multi_turn_mask", "tok_chatml"),
        ("unicode_spans", "tok_chatml"),
        ("multi_turn_mask", "tok_pad_is_eos"),
    ],
)
def test_only_what_the_target_spoke_is_learned_without_generation_markers(
    name, tokenizer_name, tokenizer_of, chats_of, expected_of, learned_texts
):
    tokenizer, expected = tokenizer_of(tokenizer_name), expected_of(f"{name}.expected.json")
    chats = chats_of(f"{name}.jsonl")
    assert set(chats) == set(expected)
    for id_, conversation in chats.items():
        encoded = encode_chat(tokenizer, conversation)
        assert len(encoded.rows) == 1
        assert learned_texts(tokenizer, encoded.rows) == expected[id_]


@pytest.mark.parametrize("template", [MARKED, MARKED_WITHOUT_END, MARKED_WITHOUT_PROMPT])
@pytest.mark.parametrize("name", ["multi_turn_mask", "unicode_spans"])
def test_generation_markers_give_the_same_mask_with_the_end_marker(
    template, name, tokenizer_of, chats_of, expected_of, learned_texts
):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = template
    for id_, texts in expected_of(f"{name}.expected.json").items():
        encoded = encode_chat(tokenizer, chats_of(f"{name}.jsonl")[id_])
        assert learned_texts(tokenizer, encoded.rows) == texts


def test_a_row_whose_answers_are_not_marked_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = MARKED.replace("m.role == 'assistant'", "m.role == 'nobody'")
    with pytest.raises(RowProblem, match="outside the template's generation markers"):
        encode_chat(tokenizer, chat(("user", "q"), ("assistant", "a")))


def test_each_answer_is_learned_as_it_was_generated_when_old_thoughts_are_dropped(
    tokenizer_of, chats_of, expected_of, learned_texts
):
    tokenizer = tokenizer_of("tok_think_history")
    for id_, texts in expected_of("think_history.expected.json")["as_generated"].items():
        encoded = encode_chat(tokenizer, chats_of("think_history.jsonl")[id_])
        assert len(encoded.rows) == len(texts)
        assert encoded.was_split == (len(texts) > 1)
        assert learned_texts(tokenizer, encoded.rows) == texts


def test_a_later_row_shows_earlier_answers_as_served(tokenizer_of, chats_of, expected_of):
    tokenizer = tokenizer_of("tok_think_history")
    rows = encode_chat(tokenizer, chats_of("think_history.jsonl")["h1"]).rows
    whole = expected_of("think_history.expected.json")["whole_render_h1"]
    assert tokenizer.decode(rows[1].ids) == whole.rstrip("\n")


def test_last_turn_only_learns_the_last_answer_and_counts_the_rest(
    tokenizer_of, chats_of, learned_texts
):
    tokenizer = tokenizer_of("tok_think_history")
    encoded = encode_chat(tokenizer, chats_of("think_history.jsonl")["h1"], turns="last")
    assert learned_texts(tokenizer, encoded.rows) == [
        "<think>\nfour times three\n</think>\n\nTwelve.<|im_end|>"
    ]
    assert encoded.left_out == ["an earlier answer (turns=last)"]


def test_a_thought_apart_and_inline_give_the_same_rows(tokenizer_of):
    tokenizer = tokenizer_of("tok_think_history")
    apart = {"role": "assistant", "content": "Four.", "reasoning_content": "add"}
    inline = {"role": "assistant", "content": "<think>\nadd\n</think>\n\nFour."}
    question = {"role": "user", "content": "2+2?"}
    rows = [
        encode_chat(
            tokenizer, parse_record({"messages": [question, answer]}, source="c", domain="d")
        ).rows
        for answer in (apart, inline)
    ]
    assert rows[0] == rows[1]


def test_a_template_that_knows_no_thoughts_gets_them_written_out(tokenizer_of, learned_texts):
    tokenizer = tokenizer_of("tok_chatml")
    message = {"role": "assistant", "content": "Four.", "reasoning_content": "add"}
    conversation = Conversation("c", "d", ({"role": "user", "content": "2+2?"}, message))
    assert learned_texts(tokenizer, encode_chat(tokenizer, conversation).rows) == [
        "<think>\nadd\n</think>\n\nFour.<|im_end|>"
    ]


def test_tool_calls_are_learned_and_tool_answers_are_not(tokenizer_of, chats_of, learned_texts):
    tokenizer, chats = tokenizer_of("tok_think_history"), chats_of("toolcalls_mixed.jsonl")
    texts = {
        id_: learned_texts(tokenizer, encode_chat(tokenizer, conversation).rows)
        for id_, conversation in chats.items()
    }
    assert texts["t3"] == [
        '<tool_call>stock_at {"bin": "B1"}</tool_call>'
        '<tool_call>stock_at {"bin": "B2", "when": null}</tool_call><|im_end|>',
        "Three and nine.<|im_end|>",
    ]
    assert '"bin": 4, "when": 1777600000' in texts["t2"][0]
    assert '"bin": "A4"' in texts["t1"][0]
    for conversation in chats.values():
        rows = encode_chat(tokenizer, conversation).rows
        rendered = "".join(tokenizer.decode(row.ids) for row in rows)
        assert "None" not in rendered.replace("None left.", "")
        assert ("You may call: stock_at" in rendered) == (conversation.tools is not None)


CALLS = (
    "{%- for c in m.tool_calls or [] %}{{- c.function.name + ' ' }}{{- ARGUMENTS }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
)


@pytest.mark.parametrize("arguments", [{"bin": "A4"}, '{"bin": "A4"}'])
@pytest.mark.parametrize(
    "wanted",
    ["c.function.arguments", "'' + c.function.arguments", "c.function.arguments | tojson"],
)
def test_tool_arguments_reach_the_template_in_the_form_it_wants(tokenizer_of, arguments, wanted):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        r"+ '<|im_end|>\n' }}{%- endfor %}", "}}" + CALLS.replace("ARGUMENTS", wanted)
    )
    call = {"function": {"name": "stock", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [{"role": "user", "content": "q"}, answer]}
    row = encode_chat(tokenizer, parse_record(record, source="c", domain="d")).rows[0]
    assert tokenizer.decode(row.ids).rstrip().endswith('assistant\nstock {"bin": "A4"}<|im_end|>')


def test_markers_and_text_arguments_go_together(tokenizer_of, learned_texts):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = MARKED.replace(
        "(m.content or '') + '<|im_end|>' }}{% endgen",
        "m.tool_calls[0].function.name + m.tool_calls[0].function.arguments + '<|im_end|>' }}{% endgen",
    )
    call = {"function": {"name": "stock", "arguments": {"bin": "A4"}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [{"role": "user", "content": "q"}, answer]}
    rows = encode_chat(tokenizer, parse_record(record, source="c", domain="d")).rows
    assert learned_texts(tokenizer, rows) == ['stock{"bin": "A4"}<|im_end|>']


def test_a_template_that_would_drop_tool_calls_in_silence_is_refused(tokenizer_of, chats_of):
    with pytest.raises(RowProblem, match="does not render tool calls"):
        encode_chat(tokenizer_of("tok_chatml"), chats_of("toolcalls_mixed.jsonl")["t3"])


@pytest.mark.parametrize(
    "name", ["tok_chatml", "tok_bos_twice", "tok_pad_is_eos", "tok_think_history"]
)
def test_a_prompt_for_generation_is_the_prefix_of_the_training_row(name, tokenizer_of, chats_of):
    tokenizer = tokenizer_of(name)
    messages = chats_of("multi_turn_mask.jsonl")["x1"].messages
    row = encode_chat(tokenizer, Conversation("c", "d", messages)).rows[0]
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = encode_prompt(tokenizer, messages[:index])
            assert row.ids[: len(prompt)] == prompt
            assert row.mask[len(prompt)]
            assert not row.mask[len(prompt) - 1]


def test_there_is_exactly_one_begin_token(tokenizer_of, chats_of):
    tokenizer, conversation = tokenizer_of("tok_bos_twice"), chats_of("multi_turn_mask.jsonl")["x2"]
    row = encode_chat(tokenizer, conversation).rows[0]
    assert row.ids[:2] == [266, 268]
    assert row.ids.count(266) == 1
    assert encode_prompt(tokenizer, conversation.messages[:1])[:2] == [266, 268]


@pytest.mark.parametrize("bos", ["", "<|bos|>"])
def test_rendered_text_gets_one_begin_token_too(bos, tokenizer_of):
    tokenizer = tokenizer_of("tok_bos_twice")
    text = f"{bos}<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    row = encode_chat(tokenizer, Conversation("c", "d", (), text=text)).rows[0]
    assert row.ids[:2] == [266, 268]
    assert row.ids.count(266) == 1


def test_rendered_text_learns_what_stands_between_the_templates_markers(
    tokenizer_of, learned_texts
):
    tokenizer = tokenizer_of("tok_chatml")
    text = (
        "<|im_start|>user\nsay assistant\n<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ncut in the mid"
    )
    encoded = encode_chat(tokenizer, Conversation("c", "d", (), text=text))
    assert learned_texts(tokenizer, encoded.rows) == ["first<|im_end|>", "cut in the mid"]


@pytest.mark.parametrize("more", ["", "<|im_start|>assistant\nciao\n"])
def test_rendered_text_is_refused_where_nothing_ends_an_answer(more, tokenizer_of, learned_texts):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "")
    one = "<|im_start|>user\nhi\n<|im_start|>assistant\nhello\n"
    encoded = encode_chat(tokenizer, Conversation("c", "d", (), text=one))
    assert learned_texts(tokenizer, encoded.rows) == ["hello\n"]
    text = f"{one}<|im_start|>user\nbye\n{more}"
    with pytest.raises(RowProblem, match="the template closes answers by nothing"):
        encode_chat(tokenizer, Conversation("c", "d", (), text=text))


def test_rendered_text_equals_the_same_chat_as_turns(tokenizer_of, chats_of):
    tokenizer, conversation = tokenizer_of("tok_chatml"), chats_of("multi_turn_mask.jsonl")["x1"]
    text = tokenizer.apply_chat_template(list(conversation.messages), tokenize=False)
    rendered = encode_chat(tokenizer, Conversation("c", "d", (), text=text))
    assert rendered.rows == encode_chat(tokenizer, conversation).rows


def test_a_template_without_special_tokens_marks_no_rendered_answers(tokenizer_of):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "### ")
    assert find_answer_marker(tokenizer) is None


def test_a_template_that_cannot_be_split_is_refused_before_any_row(tokenizer_of):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = PREFILLED
    with pytest.raises(DataError, match=r"tok_chatml cannot be used .* cannot be split .*<think>"):
        check_template(tokenizer)


def test_a_tokenizer_without_a_template_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        check_template(tokenizer)


def test_what_the_template_itself_refuses_is_a_reason(tokenizer_of):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowProblem, match="refuses the chat: roles must alternate"):
        encode_chat(tokenizer, chat(("user", "q"), ("assistant", "a")))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "empty chat"),
        ([("user", "q")], "no answer"),
        ([("user", "q"), ("assistant", "")], "empty answer"),
        ([("user", "q"), ("assistant", "  \n")], "empty answer"),
        ([("user", "q"), ("assistant", None)], "empty answer"),
        ([("system", "s"), ("assistant", "hello")], "an answer before any question"),
    ],
)
def test_a_chat_with_nothing_to_learn_says_why(tokenizer_of, turns, reason):
    with pytest.raises(RowProblem, match=f"^{reason}$"):
        encode_chat(tokenizer_of("tok_chatml"), chat(*turns))


def test_an_answer_of_weight_zero_and_an_empty_one_carry_no_loss(tokenizer_of, learned_texts):
    tokenizer = tokenizer_of("tok_chatml")
    messages = chat(
        ("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", ""),
        ("user", "3"), ("assistant", "three"), ("user", "4"),
    ).messages  # fmt: skip
    messages[1]["weight"] = 0
    encoded = encode_chat(tokenizer, Conversation("c", "d", messages))
    assert learned_texts(tokenizer, encoded.rows) == ["three<|im_end|>"]
    assert encoded.left_out == ["weight 0", "empty answer"]


def test_template_options_reach_the_template(tokenizer_of):
    tokenizer = tokenizer_of("tok_chatml")
    tokenizer.chat_template = "{{ mode }}" + tokenizer.chat_template
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "q"}], options={"mode": "terse"})
    assert tokenizer.decode(ids).startswith("terse<|im_start|>")


@pytest.fixture
def merging_tokenizer(tokenizer_of):
    """tok_chatml with one more merge: two line breaks become one token."""
    source = tokenizer_of("tok_chatml")
    parts = json.loads(source.backend_tokenizer.to_str())
    parts["model"]["vocab"]["ĊĊ"] = 274
    parts["model"]["merges"].append(["Ċ", "Ċ"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)))
    tokenizer.chat_template = source.chat_template
    return tokenizer


def test_an_answer_that_merges_with_its_prompt_still_follows_the_prompts_own_ids(merging_tokenizer):
    conversation = chat(("user", "q"), ("assistant", "\na"))
    prompt = encode_prompt(merging_tokenizer, conversation.messages[:1])
    text = merging_tokenizer.apply_chat_template(list(conversation.messages), tokenize=False)
    assert encode_text(merging_tokenizer, text)[: len(prompt)] != prompt  # the trap
    row = encode_chat(merging_tokenizer, conversation).rows[0]
    assert row.ids[: len(prompt)] == prompt
    assert row.mask == [False] * len(prompt) + [True] * (len(row.ids) - len(prompt))
    assert merging_tokenizer.decode(row.ids) == text.rstrip("\n")


def test_the_fingerprint_follows_the_vocabulary_and_not_the_last_use(
    tokenizer_of, merging_tokenizer
):
    tokenizer = copy.deepcopy(tokenizer_of("tok_chatml"))
    before = compute_tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert compute_tokenizer_fingerprint(tokenizer) == before
    assert compute_tokenizer_fingerprint(merging_tokenizer) != before
