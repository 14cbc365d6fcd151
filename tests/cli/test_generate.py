"""`draftlab generate` from its words to its summary, on the tiny target."""

import io
import re

import pytest

from draftlab.cli.generate import HELP, compute_alphas, summarise
from draftlab.cli.main import main
from draftlab.cli.schema import GenerateCommandSettings, settings_of
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.records import Generation, StepRecord
from draftlab.errors import ConfigError
from draftlab.evaluation.acceptance import compute_acceptance
from draftlab.settings.compose import compose

WORDS = ["hardware.threads=1", "target.kernels=reference", "decode.max_new_tokens=12"]


def step(drafted, accepted, emitted=None, seconds=0.1, live=1):
    emitted = accepted + 1 if emitted is None else emitted
    return StepRecord(drafted, accepted, emitted, (), seconds, 0.0, 0.0, live)


def answer(*steps, index=0, finish="eos", first=0.05, **more):
    tokens = tuple(range(1 + sum(s.num_emitted for s in steps)))
    return Generation(index, (1,), tokens, finish, steps, first, 1.0, **more)


def generate(capsys, *words):
    assert main(["generate", *words, *WORDS]) == 0
    return capsys.readouterr()


def test_the_text_goes_to_stdout_and_the_summary_to_stderr(capsys):
    said = generate(capsys, "prompt=Hi", "decode.ignore_eos=true")
    assert said.out.strip("\n")
    assert "tokens/s" not in said.out
    assert "\x1b" not in said.err
    assert "12 tokens in" in said.err
    assert "tau" in said.err
    assert "finish: 1 length" in said.err


def test_every_sampler_of_the_help_can_be_typed():
    typed = re.findall(r"decode(?:\.\w+)?=(?:\{.*?\}|\[.*?\]|[\w.]+\b)", HELP.split("examples:")[0])
    assert len(typed) >= 15
    words = ["prompt=-", *(word for word in typed if word != "decode.KEY=VALUE")]
    settings = settings_of(GenerateCommandSettings, compose("generate", words))
    assert (settings.prompt, settings.decode.stop) == ("-", ["Question:"])
    law = settings.decode.sampling
    assert law.logit_bias == ((1234, -5.0),)
    assert (law.temperature, law.top_k, law.top_p, law.min_p) == (0.7, 20, 0.8, 0.05)
    penalties = (law.repetition_penalty, law.frequency_penalty, law.presence_penalty)
    assert (penalties, law.min_new_tokens) == ((1.1, 0.3, 0.3), 20)


def test_a_mapping_that_cannot_be_read_is_named():
    with pytest.raises(ConfigError, match=r"decode\.logit_bias='\{1: \[\}'"):
        settings_of(GenerateCommandSettings, compose("generate", ["decode.logit_bias={1: [}"]))


def test_several_prompts_are_answered_in_order_at_any_batch_size(capsys, tmp_path):
    path = tmp_path / "questions.txt"
    path.write_text("one\ntwo\nthree\n")
    said = generate(capsys, f"prompts={path}", "decode.batch_size=1")
    assert said.err.strip().startswith("3 answers, ")
    assert generate(capsys, f"prompts={path}", "decode.batch_size=3").out == said.out
    alone = [generate(capsys, f"prompt={text}").out for text in ("one", "two", "three")]
    assert said.out == "\n".join(alone)


def test_prompts_that_are_too_long_are_named_by_line_before_any_is_answered(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(Decoder, "generate", lambda *_, **__: pytest.fail("decoded"))
    path = tmp_path / "questions.txt"
    path.write_text("one\n\n" + "a" * 9000 + "\nfour\n" + "b" * 9000 + "\n")
    assert main(["generate", f"prompts={path}", *WORDS]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(r"questions\.txt:3 has 9\d\d\d tokens, \S*questions\.txt:5 has", said.err)


def test_stdin_is_read(capsys, monkeypatch):
    expected = generate(capsys, "prompt=Hello").out
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert generate(capsys, "prompt=-").out == expected


def test_an_answer_ends_before_a_stop_string(capsys):
    whole = generate(capsys, "prompt=Hi").out.rstrip("\n")
    stop = next(c for c in whole[2:] if c.isascii() and c.isalnum())
    said = generate(capsys, "prompt=Hi", f'decode.stop=["{stop}"]')
    assert said.out == f"{whole[: whole.index(stop)]}\n"
    assert "finish: 1 stop" in said.err


@pytest.mark.parametrize("words", [[], ["prompt=a", "prompts=b.txt"]])
def test_asking_nothing_or_twice_is_an_error_before_a_target_is_loaded(words, capsys, monkeypatch):
    monkeypatch.setattr("draftlab.targets.load.load_target", lambda _: pytest.fail("loaded"))
    assert main(["generate", *words]) == 2
    assert "pass either prompt" in capsys.readouterr().err


def test_the_summary_counts_over_all_answers():
    answers = [
        answer(step(4, 4), step(4, 1), first=0.05),
        answer(step(4, 0), step(2, 2, emitted=2), index=1, finish="length", first=0.09),
    ]
    lines = summarise(answers, 2.0, depth=4).splitlines()
    assert lines == [
        "2 answers, 12 tokens in 2.0 s (first token after 50 to 90 ms), finish: 1 eos, 1 length",
        "tau 2.50 over 4 verify steps, 25.0 tokens/s",
        "7 of 14 draft tokens accepted (50 %), by depth 0.75 0.67 1.00 1.00",
    ]


def test_steps_that_rows_share_are_timed_once():
    together = [answer(step(0, 0, live=2), index=i) for i in range(2)]
    assert "20.0 tokens/s" in summarise(together, 1.0, depth=0)


def test_an_answer_of_one_token_has_no_acceptance():
    assert summarise([answer()], 0.5, depth=4) == (
        "1 tokens in 0.5 s (first token after 50 ms), finish: 1 eos"
    )


def test_a_rule_that_changes_the_law_is_called_lossy():
    assert "LOSSY" in summarise([answer(step(2, 1), is_lossy=True)], 1.0, depth=2)


def test_acceptance_by_depth_is_the_evaluations():
    answers = [answer(step(4, 4), step(4, 1), step(3, 0), step(1, 1)), answer(step(4, 2))]
    theirs = compute_acceptance(answers, seed=0, num_draws=100).alpha
    assert compute_alphas(answers, 4) == [alpha.value for alpha in theirs]
