"""`draftlab bench decode` on a tiny target: what the table says, what is refused, vLLM as a peer."""

import json
import sys
from ast import literal_eval

import pytest

from draftlab.cli.bench_peers import find_vllm
from draftlab.cli.main import main
from draftlab.errors import ConfigError

SMALL = ["bench", "decode", "target=tiny", "bench.prompts=2", "bench.tokens=6"]
# stands in for vLLM: answers "1 2 3 ..." and says what it was asked for
FAKE_VLLM = """
import json, os
__version__ = "0"
class SamplingParams:
    def __init__(self, **given): self.given = given
class Out:
    def __init__(self, ids): self.token_ids = ids
class Answer:
    def __init__(self, ids): self.outputs = [Out(ids)]
class LLM:
    def __init__(self, **given):
        if not given["enforce_eager"] and "COMPILER_LESS" in os.environ:
            raise RuntimeError("no C++ compiler")
        assert given["dtype"] == "float32" and os.path.isfile(given["model"] + "/config.json")
        self.given = given
    def generate(self, prompts, limits, use_tqdm):
        assert limits.given["temperature"] == 0.0 and prompts[0]["prompt_token_ids"]
        if "NOTES" in os.environ:
            drafts = "speculative_config" in self.given
            with open(os.environ["NOTES"], "w") as file:
                file.write(repr((drafts, limits.given)))
        return [Answer(list(range(1, 1 + limits.given["max_tokens"])))]
"""


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return sys.executable


def test_every_arm_has_a_line_and_the_json_says_the_same(capsys, tmp_path, fake_vllm):
    words = [f"bench.out={tmp_path / 'b.json'}", f"bench.vllm_python={fake_vllm}"]
    assert main([*SMALL, *words, "target.dtype=float32"]) == 0
    out = capsys.readouterr().out
    arms = ("transformers", "transformers lookup", "draftlab", "draftlab ngram", "vllm")
    assert all(f"\n {arm} " in out for arm in arms)
    for told in ("2 prompts x 1, at most 6 tokens", "tiny-llama", "threads", "torch 2"):
        assert told in out
    record = json.loads((tmp_path / "b.json").read_text())
    lines = {line["arm"]: line for line in record["arms"]}
    assert set(lines) == {*arms, "vllm ngram"}
    ngram = lines["draftlab ngram"]
    model = ngram["model"]
    assert ngram["tau"] == model["tau"] >= 1
    parts = model["draft_s"] + model["verify_s"] + model["misc_s"]
    assert model["predicted"] == pytest.approx(model["tau"] * model["plain_s"] / parts)
    assert model["gap"] == pytest.approx(model["measured"] / model["predicted"] - 1)
    assert 0 < ngram["host_share"] < 1
    assert ngram["num_identical_to_draftlab"] == 2
    assert lines["vllm"]["over draftlab"]["value"] > 0
    assert lines["vllm"]["num_identical_to_draftlab"] == 0


def test_vllm_says_how_it_ran(capsys, tmp_path, fake_vllm, monkeypatch):
    monkeypatch.setenv("SERVING_PYTHON", fake_vllm)
    monkeypatch.setenv("COMPILER_LESS", "1")
    assert main([*SMALL, f"bench.out={tmp_path / 'b.json'}", "target.dtype=float32"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM 0 (vllm eager, vllm ngram eager; n-gram drafting K=5" in out
    assert "vLLM: left out" not in out


def told_vllm(capsys, tmp_path, fake_vllm, monkeypatch, *words):
    """Run the bench; give what it said, its record, whether vLLM drafted last, and its limits."""
    monkeypatch.setenv("SERVING_PYTHON", fake_vllm)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    out = tmp_path / "b.json"
    assert main([*SMALL, f"bench.out={out}", "target.dtype=float32", *words]) == 0
    drafts, limits = literal_eval((tmp_path / "notes").read_text())
    said = " ".join(capsys.readouterr().out.split())
    return said, json.loads(out.read_text()), drafts, limits


def test_every_arm_goes_past_end_tokens_where_it_is_told_to(
    capsys, tmp_path, fake_vllm, monkeypatch
):
    said, record, drafts, limits = told_vllm(
        capsys, tmp_path, fake_vllm, monkeypatch, "decode.ignore_eos=true"
    )
    assert drafts
    assert limits["ignore_eos"]
    assert limits["stop_token_ids"] == []
    assert "temperature 0 (greedy), past end tokens, arms in turns" in said
    decode = record["conditions"]["decode"]
    assert (decode["ignore_eos"], decode["max_new_tokens"], decode["batch_size"]) == (True, 6, 1)


def test_vllm_is_told_penalties_and_biases_and_does_not_draft_with_them(
    capsys, tmp_path, fake_vllm, monkeypatch
):
    words = ["decode.repetition_penalty=1.2", "decode.logit_bias={7: -2.5}"]
    words += ["decode.min_new_tokens=9"]
    said, record, drafts, limits = told_vllm(capsys, tmp_path, fake_vllm, monkeypatch, *words)
    assert not drafts
    assert limits["repetition_penalty"] == 1.2
    assert limits["logit_bias"] == {7: -2.5}
    assert limits["min_tokens"] == 6
    assert not limits["ignore_eos"]
    assert limits["stop_token_ids"]
    assert "vllm ngram" not in [line["arm"] for line in record["arms"]]
    left_out = "its n-gram arm is left out: vLLM drafts without repetition_penalty, logit_bias, min"
    assert left_out in said
    assert record["conditions"]["decode"]["repetition_penalty"] == 1.2


def test_what_vllm_fails_with_is_told_beside_the_other_arms(
    capsys, tmp_path, fake_vllm, monkeypatch
):
    monkeypatch.setenv("SERVING_PYTHON", fake_vllm)
    # the stand-in takes float32 alone
    assert main([*SMALL, f"bench.out={tmp_path / 'b.json'}", "target.dtype=bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "failed and is left out: AssertionError" in out
    assert "\n draftlab ngram " in out


def test_a_python_without_vllm_is_one_line_and_named_ones_are_checked(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("SERVING_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    told = find_vllm("")
    assert isinstance(told, str)
    assert "bench.vllm_python=PATH" in told
    assert "SERVING_PYTHON" in told
    with pytest.raises(ConfigError, match="no such file"):
        find_vllm(str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="has no vllm installed"):
        find_vllm(sys.executable)
    monkeypatch.setenv("SERVING_PYTHON", sys.executable)
    with pytest.raises(ConfigError, match=r"SERVING_PYTHON=.*has no vllm installed"):
        find_vllm("")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.prompts=0", "bench.prompts='0': expected a number of at least 1"),
        ("bench.prompt=3", "unknown option 'bench.prompt=3'; known options: bench.prompts="),
        ("eval.repeats=2", "eval.repeats=2 has no effect on bench decode"),
        ("decode.max_new_tokens=9", "no effect on bench decode; pass bench.tokens"),
        ("decode.batch_size=2", "no effect on bench decode; pass bench.prompts"),
        ("decode=sampled", "bench decode compares greedy decoding"),
    ],
)
def test_words_that_cannot_take_effect_are_refused(word, message, capsys):
    assert main([*SMALL, word]) == 2
    assert message in capsys.readouterr().err
