"""The loss bench at sizes of no interest: that it measures, and what it refuses."""

import pytest

from draftlab.cli.main import main

SMALL = [
    "rows=64",
    "vocab=500",
    "draft_vocab=100,full",
    "width=16",
    "depths=2",
    "objectives=tv",
    "plain_rows=16",
    "error_rows=32",
    "error_vocab=200",
    "threads=1",
]


@pytest.mark.slow
def test_it_prints_a_row_for_every_vocabulary_and_how_it_was_measured(capsys):
    assert main(["bench", "loss", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.count("tv") == 2
    assert "full" in out
    assert "64 predictions x 2 depths, V=500, D=16, float32" in out
    assert "less inputs, parameters and their gradients" in out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rows=0", "rows='0': expected a number of at least 1"),
        ("draft_vocab=600,full", "draft_vocab='600,full': expected numbers of 1..500, or full"),
        ("objectives=kl", "objective='kl': expected one of"),
        ("dtype=float16", "dtype='float16': expected float32 or bfloat16"),
        ("device=tpu", "device='tpu': expected cpu or cuda"),
        ("threads=x", "threads='x': expected a number"),
        ("row=4", "unknown option 'row=4'"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(word, message, capsys):
    assert main(["bench", "loss", *SMALL, word]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_bench_is_refused_with_the_known_ones(capsys):
    assert main(["bench", "lose"]) == 2
    assert (
        "bench what? got lose; expected decode, families, features, loss, train or gpu"
        in capsys.readouterr().err
    )
