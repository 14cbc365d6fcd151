"""Answers that several runs share: all of them, or an error."""

import json

import pytest
import torch

from draftlab.cli import collect
from draftlab.cli.schema import RunSettings, settings_of
from draftlab.data.answers import ShardStore
from draftlab.errors import DataError
from draftlab.settings.compose import compose
from draftlab.targets.features import FeatureRequest
from draftlab.targets.tiny import tiny_target

NOTHING = FeatureRequest(tap_layers=(), wants_final=False)


@pytest.fixture
def ask(tmp_path):
    rows = [{"prompt": f"What comes after {i}?"} for i in range(5)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "data=jsonl",
        f"data.paths={tmp_path / 'own.jsonl'}",
        "data.answers=target",
        "regenerate.prompts_per_shard=2",
        "regenerate.max_new_tokens=4",
        f"paths.cache={tmp_path}",
        f"paths.outputs={tmp_path}",
    ]
    settings = settings_of(RunSettings, compose("train", words))
    target = tiny_target(dtype=torch.float32)
    return lambda **options: collect.collect_samples(
        target, settings.data, settings.regenerate, settings.paths, needs=NOTHING, seed=0, **options
    )


def drop_a_shard_when_answered(monkeypatch):
    regenerate = collect.regenerate

    def then_drop(target, questions, settings, store, **options):
        regenerate(target, questions, settings, store, **options)
        (store.folder / "shard-00001.jsonl").unlink()

    monkeypatch.setattr(collect, "regenerate", then_drop)


def test_nothing_is_trained_on_a_part_of_the_answers(ask, monkeypatch):
    drop_a_shard_when_answered(monkeypatch)
    with pytest.raises(DataError, match=r"lacks 1 of the 3 shards .* such as shard 1"):
        ask()


def test_a_part_is_taken_where_time_was_what_was_asked_for(ask, monkeypatch):
    drop_a_shard_when_answered(monkeypatch)
    assert len(ask(answer_s=60.0).samples) < 5


def test_who_had_to_wait_finds_the_answers_there(ask, monkeypatch):
    """What the first writer wrote between our first look and our turn is not written again."""
    whole = ask()
    missing, looks = ShardStore.missing, []

    def all_at_first(store, num_shards):
        looks.append(num_shards)
        return list(range(num_shards)) if len(looks) == 1 else missing(store, num_shards)

    monkeypatch.setattr(ShardStore, "missing", all_at_first)
    monkeypatch.setattr(collect, "regenerate", lambda *_, **__: pytest.fail("answers again"))
    assert [s.ids.tolist() for s in ask().samples] == [s.ids.tolist() for s in whole.samples]
    assert len(looks) > 1
