"""Exported heads in vLLM against our decoder: same tokens, same acceptances at every position."""

import pytest
from serving_cases import HEADS, METHODS, MISTAKES


@pytest.mark.parametrize(("method", "name"), HEADS, ids=map("-".join, HEADS))
def test_vllm_gives_the_greedy_tokens_and_accepts_what_our_decoder_accepts(
    method, name, served, greedy
):
    ours, theirs = served(method)
    found = theirs[name]
    assert "error" not in found, found
    assert found["tokens"] == ours[name].tokens == greedy
    assert found["num_drafts"] == ours[name].num_drafts
    assert found["per_position"] == ours[name].per_position


@pytest.mark.parametrize(("method", "name"), HEADS, ids=map("-".join, HEADS))
def test_the_head_is_right_often_enough_at_every_position_to_show_a_mistake_there(
    method, name, served
):
    ours, _ = served(method)
    counts = [ours[name].num_drafts, *ours[name].per_position]
    assert len(counts) == METHODS[method][name].depth + 1
    assert counts[-1] >= 10, counts
    assert counts[-1] < counts[0], counts


@pytest.mark.parametrize(("method", "name", "mistake"), MISTAKES, ids=map("-".join, MISTAKES))
def test_a_mistake_in_the_export_shows_in_the_counters_and_never_in_the_tokens(
    method, name, mistake, served, greedy
):
    ours, theirs = served(method)
    found = theirs[f"{name}-{mistake}"]
    if mistake == "extra_tensor":
        assert "foo" in found["error"]
        return
    assert found["tokens"] == greedy
    assert found["per_position"] != ours[name].per_position
    assert sum(found["per_position"]) < sum(ours[name].per_position)
