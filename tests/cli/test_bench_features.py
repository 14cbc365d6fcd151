import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from draftlab.cli.bench_features import (
    OUTSIDE,
    UNDECIDED,
    WITHIN,
    Arm,
    _judge,
    _read_dtypes,
    _table,
    lay_out_again,
)
from draftlab.cli.main import main
from draftlab.data.answers import AnswerFeatures, AnswerRecord, ShardStore
from draftlab.data.feature_bytes import take_vectors
from draftlab.errors import ConfigError
from draftlab.evaluation.results import Estimate

WIDTH = 64
BAR = Estimate(2.0, 1.9, 2.1, 40, "bca")


def arm(dtype, tau, is_within, accepted=40):
    return Arm(dtype, "RUN", 100, 5, tau, accepted, None if is_within is None else BAR, is_within)


@pytest.fixture
def samples(tmp_path):
    store = ShardStore(tmp_path / "answers")
    generator = torch.Generator().manual_seed(1)
    for shard in range(2):
        records = [
            AnswerRecord(f"p{shard}{i}", "chat", (), (1, 2), (3, 4, 5), "eos", 0) for i in range(2)
        ]
        features = [
            AnswerFeatures(
                torch.randn(4, 2, WIDTH, generator=generator),
                torch.randn(4, WIDTH, generator=generator),
            )
            for _ in records
        ]
        store.write(shard, records, features)
    return store.read()


@pytest.mark.parametrize(("dtype", "tolerance"), [("target", 0.0), ("bf16", 2**-8), ("fp8", 2**-4)])
def test_features_laid_out_again_are_the_same_ones_to_their_bits(
    samples, tmp_path, dtype, tolerance
):
    again = lay_out_again(samples, tmp_path / dtype, dtype)
    assert [s.sample_id for s in again] == [s.sample_id for s in samples]
    for old, new in zip(samples, again, strict=True):
        assert new.features_path.parent == tmp_path / dtype
        for a, b in zip(old.load_features(), new.load_features(), strict=True):
            bound = tolerance * a.abs() + 2**-14 * a.abs().amax(-1, keepdim=True) * (dtype == "fp8")
            assert ((b.float() - a).abs() <= bound).all()


def test_eight_bits_take_about_half_of_sixteen(samples, tmp_path):
    sizes = {}
    for dtype in ("bf16", "fp8"):
        lay_out_again(samples, tmp_path / dtype, dtype)
        path = next(iter((tmp_path / dtype).iterdir()))
        with safe_open(path, framework="pt") as file:
            assert take_vectors("taps", 0, 3, file).shape == (3, 2, WIDTH)
            tensors = [file.get_tensor(name) for name in file.keys() if name != "offsets"]  # noqa: SIM118
        sizes[dtype] = sum(t.numel() * t.element_size() for t in tensors)
    assert sizes["fp8"] / sizes["bf16"] == (WIDTH + 4) / (2 * WIDTH)


def test_samples_without_features_are_refused(samples, tmp_path):
    bare = [replace(samples[0], features_path=None)]
    with pytest.raises(ConfigError, match="these samples have none"):
        lay_out_again(bare, tmp_path / "none", "fp8")


def test_the_exit_code_says_whether_tau_kept_within_the_first_ones_interval():
    near, far, unknown = (arm("fp8", BAR, is_within) for is_within in (True, False, None))
    first = arm("bf16", BAR, None)
    assert _judge([first, near]) == WITHIN
    assert _judge([first, near, far]) == OUTSIDE
    assert _judge([first, unknown]) == UNDECIDED
    assert "OUTSIDE bf16's" in "\n".join(_table([first, far]))


def test_taus_of_arms_whose_drafts_were_all_refused_decide_nothing():
    one = Estimate(1.0, 1.0, 1.0, 40, "constant")
    arms = [arm(dtype, one, None, accepted=0) for dtype in ("bf16", "fp8")]
    arms[1] = replace(arms[1], ratio=one)
    assert _judge(arms) == UNDECIDED
    text = "\n".join(_table(arms))
    assert "UNDECIDED: no draft token was accepted" in text
    assert "within" not in text


@pytest.mark.parametrize("text", ["bf16,fp8", "[bf16,fp8]", "[bf16, fp8]"])
def test_dtypes_are_read_with_and_without_brackets(text):
    assert _read_dtypes(text) == ["bf16", "fp8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench.dtypes=fp8"], "expected two or more of target, bf16, fp8"),
        (["bench.dtypes=[fp8,int4]"], "bench.dtypes=[fp8,int4]: there is no 'int4'; expected two"),
        (["bench.dtypes=bf16,bf16"], "bf16 stands there twice"),
        (["bench.dtype=fp8"], "unknown option 'bench.dtype=fp8'; known options: bench.dtypes="),
        (["bench.out=/none/such/x.json"], "is to lie in /none/such, which is no folder here"),
        (["drafter=ngram"], "drafter=ngram has no weights"),
        (["regenerate.features_dtype=bf16"], "is what it compares"),
        (["regenerate.capture_features=false"], "keeps no features"),
        (["hardware.num_processes=2"], "runs in one process"),
        (["train.max_minutes=3"], "pass train.max_minutes=null train.max_steps=N"),
        (["decode.max_new_tokens=3"], "no effect on bench features; pass eval.max_new_tokens"),
        (["decode.batch_size=3"], "no effect on bench features; pass eval.batch_size"),
        (["train.patience=3"], "may end one arm before the other"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message, capsys):
    assert main(["bench", "features", *words]) == 2
    assert message in capsys.readouterr().err


def test_answers_that_are_given_have_no_features_to_compare(tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    words = ["data=jsonl", f"data.paths={path}", "data.answers=given"]
    assert main(["bench", "features", *words]) == 2
    assert "data.answers=given keeps none" in capsys.readouterr().err


@pytest.mark.slow
def test_two_arms_differ_in_the_bits_of_their_features_alone(tmp_path, capsys):
    out = tmp_path / "found.json"
    words = ["target=tiny", "drafter=medusa", "data.max_samples=12", "train.max_steps=4"]
    words += ["bench.dtypes=target,fp8", "eval.prompts_per_domain=2", f"bench.out={out}"]
    code = main(["bench", "features", *words, f"paths.outputs={tmp_path / 'runs'}"])
    arms = json.loads(out.read_text())["arms"]
    assert code in (WITHIN, OUTSIDE, UNDECIDED)
    assert [a["dtype"] for a in arms] == ["target", "fp8"]
    assert [a["steps"] for a in arms] == [4, 4]
    assert arms[1]["feature_bytes"] < 0.30 * arms[0]["feature_bytes"]  # float32 there
    assert arms[0]["tau"]["value"] >= 1
    assert arms[1]["ratio"]["num_prompts"] > 2
    assert "share" in capsys.readouterr().out
