import pytest
import torch

from draftlab.errors import ConfigError
from draftlab.targets.step import Step
from draftlab.targets.tiny import build_tiny_model, tiny_tokenizer

TEXTS = ["hello", " two  spaces ", "naïve 日本語 🎉", "a\n\tb", "<|im_end|>"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_gives_back_any_text(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_has_one_id_a_byte_and_a_marker():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) <= 300
    assert len(tokenizer("日")["input_ids"]) == 3
    for marker in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer(marker)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_chat_template_is_chatml():
    text = tiny_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        tokenize=False,
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"


def test_the_generation_prompt_is_a_prefix_of_the_answered_chat():
    tokenizer = tiny_tokenizer()
    asked = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(
        [*asked, {"role": "assistant", "content": "ho"}], tokenize=False
    )
    assert whole.startswith(prompt)


def test_tool_calls_are_rendered():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    text = tiny_tokenizer().apply_chat_template(
        [{"role": "assistant", "content": None, "tool_calls": [call]}], tokenize=False
    )
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text


def test_greedy_text_is_peaked_and_not_constant(target, random_ids):
    kv = target.open_kv(2, 64)
    logits = target.run(
        kv, Step(torch.arange(2), random_ids(2, 8), torch.zeros(2).long(), 8)
    ).logits
    seen, sure = [], []
    for place in range(8, 40):
        probs = logits[:, -1].softmax(-1)
        ids = probs[:, :261].argmax(-1)
        seen.append(ids)
        sure.append(probs.max(-1).values)
        base = torch.full((2,), place)
        logits = target.run(kv, Step(torch.arange(2), ids[:, None], base, place + 1)).logits
    for row in torch.stack(seen, 1):
        assert len(set(row.tolist())) >= 5
    assert float(torch.stack(sure).mean()) > 0.2


def test_the_seed_decides_the_weights_and_nothing_else_moves():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first, again, other = (build_tiny_model("llama", seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'lama'.*llama, qwen3"):
        build_tiny_model("lama")
