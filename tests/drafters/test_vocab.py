import pytest
import torch

from draftlab.drafters.vocab import (
    DraftVocab,
    choose_vocab,
    describe_coverage,
    judged_rows,
    kept_target_head,
    measure_coverage,
    required_ids,
)
from draftlab.errors import ConfigError
from draftlab.targets.tiny import tiny_target

COUNTS = torch.tensor([5, 0, 9, 9, 1, 0, 7, 0, 3, 100])


def test_the_most_frequent_ids_are_chosen_and_ties_go_to_the_lower_id():
    vocab = choose_vocab(COUNTS, 3, always=(), num_token_ids=9)
    assert vocab.ids.tolist() == [2, 3, 6]
    assert choose_vocab(COUNTS, 1, always=(), num_token_ids=9).ids.tolist() == [2]


def test_required_ids_are_inside_whatever_their_count():
    vocab = choose_vocab(COUNTS, 4, always=[7, 1, 7], num_token_ids=9)
    assert vocab.ids.tolist() == [1, 2, 3, 7]


def test_padding_ids_are_never_chosen_even_when_counted_or_required():
    vocab = choose_vocab(COUNTS, 9, always=[9], num_token_ids=9)
    assert vocab.ids.tolist() == list(range(9))


@pytest.mark.parametrize("size", [1, 10])
def test_a_size_below_what_is_required_or_above_what_exists_is_refused(size):
    with pytest.raises(ConfigError, match=f"draft_vocab_size={size}.*at least 2.*at most 9"):
        choose_vocab(COUNTS, size, always=[0, 1], num_token_ids=9)


def test_maps_are_offsets_and_a_mask():
    vocab = DraftVocab(torch.tensor([1, 2, 6]), 8)
    assert vocab.d2t.tolist() == [1, 1, 4]
    assert vocab.t2d.tolist() == [False, True, True, False, False, False, True, False]


def test_coverage_is_the_share_of_counted_tokens_inside():
    vocab = choose_vocab(COUNTS, 3, always=(), num_token_ids=9)
    assert vocab.coverage(COUNTS) == pytest.approx(25 / 134)
    assert vocab.coverage(torch.zeros(10, dtype=torch.int64)) == 1.0


@pytest.mark.parametrize("ids", [[], [3, 2], [1, 1], [-1, 2], [1, 8]])
def test_ids_that_are_no_vocabulary_are_refused(ids):
    with pytest.raises(ConfigError, match="ascending, unique"):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), 8)


def test_end_special_and_template_tokens_are_required_and_other_text_is_not():
    target = tiny_target()
    ids = required_ids(target.spec, target.tokenizer)
    tokens = target.tokenizer.convert_ids_to_tokens(ids)
    assert set(target.spec.eos_ids) <= set(ids)
    assert {"<|im_start|>", "<|im_end|>", "<tool_call>"} <= set(tokens)
    assert set(target.tokenizer.encode("assistant\n", add_special_tokens=False)) <= set(ids)
    assert target.tokenizer.convert_tokens_to_ids("Z") not in ids


KEPT = DraftVocab(torch.arange(0, 320, 3), 320)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_kept_rows_of_a_plain_head_are_its_rows(family, dtype):
    target = tiny_target(family, dtype=dtype, num_hidden_layers=2)
    rows = kept_target_head(target.view, KEPT)
    assert rows is not None
    assert torch.equal(rows, target.view.head_rows(KEPT.ids))


@pytest.mark.parametrize("range_of_weights", [0.14, 0.001])
def test_a_target_that_caps_its_logits_has_no_kept_rows_however_small_its_weights(range_of_weights):
    target = tiny_target(
        "gemma3",
        num_hidden_layers=2,
        final_logit_softcapping=30.0,
        initializer_range=range_of_weights,
    )
    assert kept_target_head(target.view, KEPT) is None


def test_a_whole_vocabulary_has_no_kept_rows():
    view = tiny_target(num_hidden_layers=2).view
    assert kept_target_head(view, None) is None
    assert kept_target_head(view, DraftVocab(torch.arange(320), 320)) is None


def test_an_eighth_of_predictions_is_judged_by_position_in_the_sample():
    positions = torch.tensor([0, 1, 7, 8, 9, 16, 0, 24])
    assert judged_rows(positions).tolist() == [True, False, False, True, False, True, True, True]


def test_coverage_and_ceilings_are_told_by_domain_and_together():
    target = tiny_target(num_hidden_layers=2)
    learned = {"code": torch.tensor([0, 1, 3, 4]), "chat": torch.tensor([3, 6])}
    finals = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chat, code, whole = measure_coverage(KEPT, target.view, learned, {"code": finals})
    law = target.view.head(finals).softmax(-1)
    assert (chat.domain, chat.tokens, chat.argmax, chat.mass) == ("chat", 1.0, None, None)
    assert (code.num_tokens, code.tokens, code.num_judged) == (4, 0.5, 9)
    assert code.mass == pytest.approx(law[:, ::3].sum(-1).mean().item(), rel=1e-4)
    assert code.argmax == pytest.approx((law.argmax(-1) % 3 == 0).double().mean().item())
    assert (whole.domain, whole.num_tokens, whole.mass) == ("all", 6, code.mass)
    assert whole.tokens == pytest.approx(4 / 6)


def test_the_table_has_a_line_for_every_domain_and_warns_of_a_long_tail():
    target = tiny_target(num_hidden_layers=2)
    learned = {"code": torch.tensor([0, 1]), "chat": torch.tensor([3] * 20)}
    text = describe_coverage(KEPT, measure_coverage(KEPT, target.view, learned, {}))
    lines = [line.split() for line in text.splitlines()]
    assert ["chat", "20", "100.0", "%", "-", "-"] in lines
    assert ["all", "22", "95.5", "%", "-", "-"] in lines
    assert "long tail: 1 of 2 domains are below 95.0 % (code 50.0 %)" in text


def test_no_warning_where_every_domain_is_covered():
    target = tiny_target(num_hidden_layers=2)
    found = measure_coverage(KEPT, target.view, {"chat": torch.tensor([3, 6])}, {})
    assert "long tail" not in describe_coverage(KEPT, found)
