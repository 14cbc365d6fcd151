"""Chats read for training as the target at hand can read them."""

import json

import torch

from draftlab.cli.collect import collect_samples
from draftlab.cli.schema import RunSettings, settings_of
from draftlab.settings.compose import compose
from draftlab.targets.features import FeatureRequest
from draftlab.targets.tiny import tiny_target


def test_given_answers_end_where_the_target_reads_no_further(tmp_path):
    question, answer = ("user", "Tell me. " * 40), ("assistant", "word " * 80)
    turns = [{"role": role, "content": content} for role, content in (question, answer)]
    (tmp_path / "own.jsonl").write_text(json.dumps({"messages": turns}))
    words = [
        "data=jsonl",
        f"data.paths={tmp_path / 'own.jsonl'}",
        "data.max_tokens=1024",
        f"paths.cache={tmp_path}",
    ]
    settings = settings_of(RunSettings, compose("train", words))
    target = tiny_target("gpt2", dtype=torch.float32)
    needs = FeatureRequest(tap_layers=(), wants_final=True)
    collected = collect_samples(
        target, settings.data, settings.regenerate, settings.paths, needs=needs, seed=0
    )
    assert [len(sample) for sample in collected.samples] == [target.spec.max_positions]
    assert collected.facts["data"]["num_cut"] == 1
