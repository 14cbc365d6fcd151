"""Exported heads in vLLM against our decoder: same tokens, same acceptances at every position."""

import pytest
from serving_cases import HEADS, METHODS, MISTAKES

SEEN = 5  # acceptances that a mistake costs at least


@pytest.mark.parametrize(("method", "name"), HEADS, ids=map("-".join, HEADS))
def test_vllm_gives_the_greedy_tokens_and_accepts_what_our_decoder_accepts(
    method, name, served, greedy
):
    ours, theirs = served[0][method, name], served[1][method, name, None]
    assert "error" not in theirs, theirs
    assert theirs["tokens"] == ours.tokens == greedy[METHODS[method][name].head_dim]
    assert theirs["num_drafts"] == ours.num_drafts
    assert theirs["per_position"] == ours.per_position


@pytest.mark.parametrize(("method", "name"), HEADS, ids=map("-".join, HEADS))
def test_the_head_is_right_often_enough_at_every_position_to_show_a_mistake_there(
    method, name, served
):
    ours = served[0][method, name]
    counts = [ours.num_drafts, *ours.per_position]
    assert len(counts) == METHODS[method][name].depth + 1
    assert counts[-1] >= 10, counts
    assert counts[-1] < counts[0], counts


@pytest.mark.parametrize(("method", "name"), [("dspark", "learned_mask")])
def test_vllms_confidence_head_is_as_sure_as_ours(method, name, served):
    ours = served[2][method, name]
    assert max(ours) - min(ours) > 0.01
    assert served[1][method, name, None]["confidence"] == pytest.approx(ours, abs=1e-5)


@pytest.mark.parametrize(("method", "name", "mistake"), MISTAKES, ids=map("-".join, MISTAKES))
def test_a_mistake_in_the_export_shows_in_the_counters_and_never_in_the_tokens(
    method, name, mistake, served, greedy
):
    ours, theirs = served[0][method, name], served[1][method, name, mistake]
    if mistake == "extra_tensor":
        assert "foo" in theirs["error"]
        return
    assert theirs["tokens"] == greedy[METHODS[method][name].head_dim]
    assert sum(ours.per_position) - sum(theirs["per_position"]) >= SEEN
