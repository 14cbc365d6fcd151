import json

import pytest

from draftlab.cli.estimate import Estimate, find_target_sizes, require_disk
from draftlab.cli.main import main
from draftlab.errors import ConfigError

GOOD = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]}


def test_a_good_run_is_described_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "drafter=ngram", "train.max_minutes=3"]) == 0
    out = capsys.readouterr().out
    assert "drafter=ngram" in out
    assert "at most 3 for the optimizer steps" in out
    assert "start it: draftlab train drafter=ngram train.max_minutes=3" in out
    assert list(tmp_path.iterdir()) == []


def test_own_files_are_counted(tmp_path, capsys):
    path = tmp_path / "What's 2+2, (1) 次.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n")
    assert main(["check", "drafter=ngram", "data=jsonl", f"data.paths={path}"]) == 0
    assert "jsonl, 2 chats to train on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lrr=3"], "unknown key optim.lrr; nearest: optim.lr"),
        (["recipe=no/such"], "unknown recipe 'no/such'; nearest: "),
        (["data=jsonl", "data.paths=nowhere/x.jsonl"], "nowhere/x.jsonl does not exist"),
        (["optim.lr=fast"], "optim.lr='fast'"),
        (["drafter=nowhere"], "unknown choice drafter=nowhere"),
        (["-m", "seed=1"], "sweeps"),
        (["RUN"], "unexpected 'RUN'"),
    ],
)
def test_what_cannot_work_is_code_2_and_one_message(words, message, capsys):
    assert main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_every_bad_line_is_named(tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + '\n{"messages": \n\n[1]\n')
    assert main(["check", "data=jsonl", f"data.paths={path}"]) == 2
    err = capsys.readouterr().err
    assert "2" in err
    assert "4" in err
    assert "bad.jsonl" in err


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("draftlab.cli.estimate.free_bytes", lambda _: 2**30)
    estimate = Estimate(
        num_prompts=1, memory_bytes=None, token_bytes=9, disk_bytes=5 * 2**30, minutes=None
    )
    with pytest.raises(ConfigError, match=r"1\.0 GiB free and this run may write 5\.0 GiB"):
        require_disk(estimate, tmp_path)


def test_sizes_of_a_local_target_come_from_its_config(tmp_path):
    from draftlab.cli.launch import compose_run

    words = ["drafter=ngram", "target=local", f"target.name={tmp_path}"]
    target = compose_run(words)[0].target
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_target_sizes(target)
    (tmp_path / "config.json").write_text('{"hidden_size": 48, "dtype": "bfloat16"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    sizes = find_target_sizes(target)
    assert sizes is not None
    assert (sizes.hidden_size, sizes.num_parameters) == (48, 1000)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["drafter=eagle3"], 4 * 64 * 4),
        (["drafter=eagle3", "regenerate.features_dtype=bf16"], 4 * 64 * 2),
        (["drafter=eagle3", "regenerate.features_dtype=fp8"], 4 * (64 + 4)),
        (["drafter=medusa", "regenerate.features_dtype=bf16"], 64 * 2),
        (["drafter=ngram"], 0),
    ],
)
def test_the_bytes_of_a_token_follow_drafter_and_dtype(words, expected, capsys):
    assert main(["check", "target=tiny", "target.dtype=float32", *words]) == 0
    assert f" {expected:,} bytes a token" in capsys.readouterr().out


def test_a_dtype_for_features_that_are_not_kept_is_refused(capsys):
    words = ["regenerate.features_dtype=fp8", "regenerate.capture_features=false"]
    assert main(["check", *words]) == 2
    assert "has no effect" in capsys.readouterr().err
