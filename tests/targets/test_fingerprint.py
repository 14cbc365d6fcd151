import torch

from draftlab.targets.fingerprint import fingerprint_tokenizer, fingerprint_weights
from draftlab.targets.tiny import build_tiny_model, tiny_tokenizer


def test_equal_weights_have_equal_fingerprints():
    assert fingerprint_weights(build_tiny_model("llama")) == fingerprint_weights(
        build_tiny_model("llama")
    )


def test_one_changed_weight_changes_the_fingerprint():
    model = build_tiny_model("llama")
    before = fingerprint_weights(model)
    with torch.no_grad():
        model.lm_head.weight[7, 13] += 1e-12
    assert fingerprint_weights(model) != before


def test_another_dtype_is_another_fingerprint():
    model = build_tiny_model("llama", torch.float32)
    assert fingerprint_weights(model) != fingerprint_weights(model.to(torch.bfloat16))


def test_the_tokenizers_fingerprint_sees_vocabulary_and_template():
    plain = fingerprint_tokenizer(tiny_tokenizer())
    assert plain == fingerprint_tokenizer(tiny_tokenizer())
    longer, retold = tiny_tokenizer(), tiny_tokenizer()
    longer.add_tokens(["<extra>"])
    retold.chat_template = "{{ messages }}"
    assert len({plain, fingerprint_tokenizer(longer), fingerprint_tokenizer(retold)}) == 3


def test_padding_and_truncation_do_not_change_the_tokenizers_fingerprint():
    tokenizer = tiny_tokenizer()
    before = fingerprint_tokenizer(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert fingerprint_tokenizer(tokenizer) == before
