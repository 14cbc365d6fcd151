"""vLLM as a peer of `draftlab bench decode`: a child process of the interpreter that has it.

In: an interpreter, a target, prompts. Out: timings of the arms `vllm` and `vllm ngram`, and how
they ran. They are timed after the others, not in turns with them: another process holds its own
copy of the target.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab.errors import ConfigError, DraftlabError

if TYPE_CHECKING:
    from draftlab.decoding.settings import DecodeSettings
    from draftlab.evaluation.speed import Timing
    from draftlab.targets.settings import TargetSettings
    from draftlab.targets.target import Target

PYTHON_VARIABLE = "SERVING_PYTHON"
_CHILD = Path(__file__).with_name("bench_vllm.py")
_LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
_ARMS = {"vllm": {}, "vllm ngram": {"speculative_config": _LOOKUP}}
_WARMUP_PROMPTS = 2
_ENVIRONMENT = {
    # generation in the calling thread: another process would have to share the same cores
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # as many threads as the other arms have, where the system puts them
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def find_vllm(named: str) -> Path | str:
    """Find an interpreter that has vLLM: the one named, that of SERVING_PYTHON, else this one.

    Returns:
        The interpreter, or one line that says why vLLM is left out.

    Raises:
        ConfigError: the interpreter named is not there, or has no vLLM.
    """
    source = f"bench.vllm_python={named}"
    if not named:
        named = os.environ.get(PYTHON_VARIABLE, "")
        source = f"{PYTHON_VARIABLE}={named}"
    python = Path(named or sys.executable).expanduser()
    if named and not python.is_file():
        raise ConfigError(f"{source}: no such file; expected a Python interpreter")
    words = [
        str(python),
        "-c",
        "import importlib.util as u; print(u.find_spec('vllm') is not None)",
    ]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.stdout.strip() == "True":
        return python
    if named:
        raise ConfigError(f"{source}: that interpreter has no vllm installed")
    return (
        "vLLM: left out, not installed here; bench.vllm_python=PATH (or the variable "
        f"{PYTHON_VARIABLE}) names a Python that has it, such as make test-serving's "
        ".venv-serving/bin/python"
    )


def time_vllm(
    python: Path,
    target: "Target",
    settings: "TargetSettings",
    decode: "DecodeSettings",
    prompts: Sequence[Sequence[int]],
    tokens: int,
    repeats: int,
) -> "tuple[list[Timing], str]":
    """Time both arms of vLLM on the same prompts and limits, with as many threads.

    Args:
        python: has vLLM.
        target: the same weights are given to vLLM.
        settings: where those come from.
        decode: greedy, without what transformers refuses; vLLM is told the same.
        prompts: token ids.
        tokens: length limit of an answer.
        repeats: times each prompt is timed.

    Returns:
        The timings, and a line on how vLLM ran.

    Raises:
        DraftlabError: vLLM failed, with its error.
    """
    import torch

    made: list[Timing] = []
    told: dict[str, Any] = {}
    how: list[str] = []
    with tempfile.TemporaryDirectory(prefix="draftlab-vllm-") as folder:
        model, revision = _place_of(target, settings, Path(folder) / "model")
        asked: dict[str, Any] = {
            "model": model,
            "revision": revision,
            "trusts_code": settings.remote_code == "trust",
            "dtype": target.spec.dtype,
            "prompts": [list(ids) for ids in prompts],
            "sampling": _sampling(decode, tokens, target.spec.eos_ids),
            "logit_bias": list(decode.sampling.logit_bias),
            "max_length": max(map(len, prompts)) + tokens + 1,
            "kv_gib": _kv_gib(target, max(map(len, prompts)) + tokens),
            "warmup_prompts": _WARMUP_PROMPTS,
            "repeats": repeats,
        }
        unsure = _undrafted(decode)
        for arm, drafting in _ARMS.items():
            if drafting and unsure:
                continue
            print(f"{arm}: in a process of its own", flush=True)
            told, is_eager = _ask_twice(python, asked | {"drafting": drafting}, Path(folder))
            how.append(f"{arm} {'eager' if is_eager else 'compiled'}")
            made += _timings(arm, told["answers"], prompts, asked["sampling"]["stop_token_ids"])
    ours = torch.get_num_threads()
    lookup = (
        f"; n-gram drafting K={_LOOKUP['num_speculative_tokens']}, matches of "
        f"{_LOOKUP['prompt_lookup_max']} to {_LOOKUP['prompt_lookup_min']} tokens"
    )
    return made, (
        f"vLLM {told['version']} ({', '.join(how)}{'' if unsure else lookup}): after the others, "
        f"{told['threads']} threads"
        + ("" if told["threads"] == ours else f", draftlab {ours}")
        + (f"; its n-gram arm is left out: vLLM drafts without {', '.join(unsure)}" * bool(unsure))
    )


def _sampling(decode: "DecodeSettings", tokens: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Give vLLM's words for greedy decoding; bias, penalty and least length mean there what here.

    Ids named as stops end an answer whatever `ignore_eos` says, so none is named with it.
    """
    return {
        "temperature": 0.0,
        "max_tokens": tokens,
        "min_tokens": min(decode.min_new_tokens, tokens),
        "stop_token_ids": [] if decode.ignore_eos else list(eos_ids),
        "ignore_eos": decode.ignore_eos,
        "repetition_penalty": decode.repetition_penalty,
    }


def _undrafted(decode: "DecodeSettings") -> list[str]:
    """Name what is on that vLLM, by version, drops, refuses or does not draft with."""
    on = {
        "repetition_penalty": decode.repetition_penalty != 1,
        "logit_bias": bool(decode.logit_bias),
        "min_new_tokens": decode.min_new_tokens > 0,
    }
    return [key for key, is_on in on.items() if is_on]


def _timings(
    arm: str,
    answers: Sequence[Sequence[Sequence[Any]]],
    prompts: Sequence[Sequence[int]],
    eos_ids: Sequence[int],
) -> "list[Timing]":
    """Put answers, repeat by repeat, into the form that the other arms' have."""
    from draftlab.decoding.records import Generation, StepRecord
    from draftlab.evaluation.speed import Timing

    made = []
    for repeat, turn in enumerate(answers):
        for index, (ids, seconds) in enumerate(turn):
            rest = StepRecord(0, 0, len(ids) - 1, (), 0.0, seconds, 0.0, 1)
            answer = Generation(
                prompt_index=index,
                prompt_ids=tuple(prompts[index]),
                output_ids=tuple(ids),
                finish="eos" if ids[-1] in eos_ids else "length",
                steps=(rest,) if len(ids) > 1 else (),
                first_token_s=0.0,
                decode_s=seconds,
            )
            made.append(Timing(arm, index, repeat, seconds, answer))
    return made


def _place_of(target: "Target", settings: "TargetSettings", folder: Path) -> tuple[str, str | None]:
    """Give a folder or hub id that vLLM can load the same weights from."""
    if settings.source in ("hub", "local"):
        assert settings.name is not None
        return settings.name, settings.revision
    if settings.source == "demo":
        from draftlab.targets.demo import prepare_demo

        return str(prepare_demo(Path(settings.cache_dir).expanduser())), None
    target.model.save_pretrained(folder)
    return str(folder), None


def _kv_gib(target: "Target", length: int) -> int:
    """Give GiB that hold a row's keys and values twice over; by itself vLLM asks for all memory."""
    bytes_a_token = 2 * 4 * target.spec.num_layers * target.spec.hidden_size
    return 1 + 2 * bytes_a_token * length // 2**30


def _ask_twice(python: Path, asked: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bool]:
    """Run vLLM compiled, its own choice; without a C++ compiler that fails, and eager it runs."""
    found = _ask(python, asked | {"is_eager": False}, folder)
    if "error" not in found:
        return found, False
    again = _ask(python, asked | {"is_eager": True}, folder)
    if "error" in again:
        raise DraftlabError(f"vLLM ({python}) failed and is left out: {again['error']}")
    return again, True


def _ask(python: Path, asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    given, answered = folder / "asked.json", folder / "answered.json"
    given.write_text(json.dumps(asked), encoding="utf-8")
    answered.unlink(missing_ok=True)
    run = {
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_CPU_KVCACHE_SPACE": str(asked["kv_gib"]),
    }
    words = [str(python), str(_CHILD), str(given), str(answered)]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **_ENVIRONMENT, **run},
    )
    if not answered.is_file():  # it was killed, or cannot even start
        last = done.stderr.strip().splitlines()[-1:] or [""]
        return {"error": f"exit code {done.returncode} {last[0]}".rstrip()}
    return json.loads(answered.read_text(encoding="utf-8"))
