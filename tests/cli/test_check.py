import json

import pytest

from draftlab.cli.estimate import Estimate, require_disk
from draftlab.cli.main import main
from draftlab.errors import ConfigError

GOOD = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]}


def test_a_good_run_is_described_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "drafter=medusa", "train.max_minutes=3"]) == 0
    out = capsys.readouterr().out
    assert "drafter=medusa" in out
    assert "at most 3 for the optimizer steps" in out
    assert "start it: draftlab train drafter=medusa train.max_minutes=3" in out
    assert list(tmp_path.iterdir()) == []


def test_own_files_are_counted(tmp_path, capsys):
    path = tmp_path / "What's 2+2, (1) 次.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n")
    assert main(["check", "data=jsonl", f"data.paths={path}"]) == 0
    assert "jsonl, 2 chats to train on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lrr=3"], "unknown key optim.lrr; nearest: optim.lr"),
        (["recipe=no/such"], "unknown recipe 'no/such'; nearest: "),
        (["data=jsonl", "data.paths=nowhere/x.jsonl"], "nowhere/x.jsonl does not exist"),
        (["optim.lr=fast"], "optim.lr='fast'"),
        (["drafter=nowhere"], "unknown choice drafter=nowhere"),
        (["hardware.threads=9999"], "hardware.threads=9999 is more than the cores"),
        (["-m", "seed=1"], "sweeps"),
        (["RUN"], "unexpected 'RUN'"),
        (["resume=outputs/adhoc/RUN"], "check looks at those of a new one"),
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
        workload=None,
        outline=None,
        drafter=None,
        dtype="float32",
        memory_bytes=None,
        token_bytes=9,
        disk_bytes=5 * 2**30,
        minutes=None,
    )
    with pytest.raises(ConfigError, match=r"1\.0 GiB free and this run may write 5\.0 GiB"):
        require_disk(estimate, tmp_path)


def test_a_model_with_code_of_its_own_is_sized_by_its_files(tmp_path, capsys):
    words = ["drafter=ngram", "target=local", f"target.name={tmp_path}"]
    assert main(["check", *words]) == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"hidden_size": 48, "dtype": "bfloat16"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(2 * 2**20))
    assert main(["check", *words, "target.dtype=float32"]) == 0
    said = capsys.readouterr().out
    assert "4 MiB of weights; more is known once it is loaded" in said
    assert "memory of" not in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["drafter=eagle3"], 4 * 64 * 4),
        (["drafter=eagle3", "regenerate.features_dtype=bf16"], 4 * 64 * 2),
        (["drafter=eagle3", "regenerate.features_dtype=fp8"], 4 * (64 + 4)),
        (["drafter=medusa", "regenerate.features_dtype=bf16"], 64 * 2),
    ],
)
def test_the_bytes_of_a_token_follow_drafter_and_dtype(words, expected, capsys):
    assert main(["check", "target=tiny", "target.dtype=float32", *words]) == 0
    assert f" {expected:,} bytes a token" in capsys.readouterr().out


def test_a_dtype_for_features_that_are_not_kept_is_refused(capsys):
    words = ["regenerate.features_dtype=fp8", "regenerate.capture_features=false"]
    assert main(["check", *words]) == 2
    assert "has no effect" in capsys.readouterr().err


LLAMA = ["target=llama3.1-8b-instruct", "hardware=single_gpu", "data=hub", "data.hub_name=a/b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["accelerator=abacus"], "accelerator=abacus is not known; known: rtx4090"),
        (["target=hub", "target.name=openai/gpt-oss-20b"], "is quantised (mxfp4)"),
    ],
)
def test_what_no_machine_could_run_is_code_2(words, message, capsys):
    assert main(["check", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_device_that_is_too_small_is_warned_of(capsys, monkeypatch):
    assert main(["check", *LLAMA, "data.max_samples=1000", "accelerator=rtx4090"]) == 0
    said = capsys.readouterr().out
    assert "warning: training may take" in said
    assert "and RTX 4090 has 24: lower train.batch_rows" in said
    assert main(["check", *LLAMA, "data.max_samples=1000", "accelerator=h200"]) == 0
    assert "training may take" not in capsys.readouterr().out
    small = {"name": "Small 8", "memory_bytes": 8_000_000_000}
    monkeypatch.setattr("draftlab.cli.run_warnings.describe_gpus", lambda: [small])
    assert main(["check", *LLAMA, "data.max_samples=1000", "accelerator=h200"]) == 0
    assert "and this machine's Small 8 has 8: lower train.batch_rows" in capsys.readouterr().out


def test_devices_and_keys_that_are_missing_here_are_named(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    assert main(["check", *LLAMA]) == 0
    said = capsys.readouterr().out
    assert "this run needs 1 CUDA devices, one a process" in said
    assert "torch sees 0 here" in said
    assert "is gated: accept the Llama 3.1 Community License at https://huggingface.co/" in said
    assert "unknown number of chats to train on; data.max_samples=N bounds it" in said
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("HF_TOKEN", "key")
    assert main(["check", *LLAMA]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hardware=fsdp"], "threads (ddp, shard=drafter)"),
        (["hardware=ddp"], "threads (ddp)"),
        ([], "threads (cpu)"),
    ],
)
def test_what_is_cut_over_the_processes_is_told(words, told, capsys):
    assert main(["check", *words]) == 0
    assert told in capsys.readouterr().out


def test_where_hours_cannot_be_told_the_probe_is_named(capsys):
    hint = "probe=true measures them here"
    assert main(["check"]) == 0
    assert hint in capsys.readouterr().out
    assert main(["check", *LLAMA, "data.max_samples=1000"]) == 0
    assert hint not in capsys.readouterr().out


def test_a_target_that_the_gate_will_refuse_is_told(tmp_path, capsys):
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 320}
    sizes |= {"intermediate_size": 128, "num_attention_heads": 4}
    sizes["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert main(["check", "target=local", f"target.name={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "speculation     refused: its rope type is 'dynamic'" in said
    assert "cannot be decoded speculatively" in said


def test_a_hub_model_of_which_nothing_is_known_is_named(capsys):
    assert main(["check", "target=hub", "target.name=owner/unheard-of"]) == 0
    said = capsys.readouterr().out
    assert "nothing is known of owner/unheard-of here" in said
    assert "memory of" not in said
