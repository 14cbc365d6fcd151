"""`draftlab bench train` at sizes of no interest: that it measures, and what it refuses."""

import json

import pytest
import torch

from draftlab.cli.bench_train import TrainCase, _measure
from draftlab.cli.families import compose_families
from draftlab.cli.main import main

SMALL = ["bench.steps=2", "bench.warmup=1", "bench.sample_tokens=48", "bench.answer_tokens=16"]
ROWS = [
    "target.kernels=reference",
    "train.row_tokens=96",
    "train.batch_rows=2",
    "train.precision=no",
    "hardware.threads=1",
]


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("is_kept", ["true", "false"])
def test_a_familys_steps_are_timed_and_their_memory_read(is_kept):
    words = ["families=eagle3", *ROWS, f"regenerate.capture_features={is_kept}"]
    (family,) = compose_families(words, target="tiny")
    plain = family.settings.model_dump(mode="json")
    found = _measure(TrainCase("eagle3", plain, 2, 1, 48, 16))
    assert found["num_parameters"] > 0
    assert found["sample_tokens"] == 48
    # rows are full: 2 rows of 2 samples of 48 tokens
    assert found["tokens_per_s"] == pytest.approx(48 * found["samples_per_s"])
    assert found["step_s"] > 0
    assert found["peak_bytes"] is None or found["peak_bytes"] >= found["at_rest_bytes"] > 0


@pytest.mark.slow
def test_the_table_has_a_row_a_family_and_says_how_it_was_measured(capsys, tmp_path):
    out = tmp_path / "t.json"
    words = [
        "families=[medusa,eagle]",
        *SMALL,
        *ROWS,
        "eagle.train.row_tokens=40",
        f"bench.out={out}",
    ]
    assert main(["bench", "train", *words]) == 0
    said = capsys.readouterr().out
    for told in (
        *("medusa", "eagle", "samples/s", "peak MB", "2 steps after 1", "1 thread,"),
        # samples end where rows do
        "2 rows of 96 tokens in samples of 48, float32, muon: medusa",
        "2 rows of 40 tokens in samples of 40, float32, muon: eagle",
    ):
        assert told in said
    record = json.loads(out.read_text())
    assert [row["family"] for row in record["families"]] == ["medusa", "eagle"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.steps=0", "bench.steps='0': expected a number of at least 1"),
        ("bench.step=3", "unknown option 'bench.step=3'; known options: bench.steps="),
        ("bench.answer_tokens=48", "expected fewer than bench.sample_tokens=48"),
        ("data.max_samples=3", "data.max_samples=3 has no effect on bench train"),
        ("regenerate.max_new_tokens=3", "regenerate.max_new_tokens=3 has no effect"),
        ("eval=smoke", "eval=smoke has no effect"),
        ("medusa.eval=smoke", "medusa.eval=smoke has no effect"),
        ("train.max_steps=3", "takes bench.warmup and then bench.steps steps"),
        ("train.patience=3", "train.patience=3 has no effect"),
        ("medusa.train.save_every_steps=3", "medusa.train.save_every_steps=3 has no effect"),
    ],
)
def test_words_that_cannot_take_effect_are_refused(word, message, capsys):
    assert main(["bench", "train", "families=medusa", *SMALL, word]) == 2
    assert message in capsys.readouterr().err
