"""vLLM as a peer of `draftlab bench decode`: a child process of the interpreter that has it.

In: an interpreter, a target, prompts. Out: timings of the arms `vllm` and `vllm ngram`. They are
timed after the others, not in turns with them: another process holds its own copy of the target.
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
    from draftlab.evaluation.speed import Timing
    from draftlab.targets.settings import TargetSettings
    from draftlab.targets.target import Target

_CHILD = Path(__file__).with_name("bench_vllm.py")
_ARMS = {"vllm": 0, "vllm ngram": 4}  # draft tokens of n-gram drafting, vLLM's usual choice
_WARMUP_PROMPTS = 2


def find_vllm(named: str) -> Path | str:
    """Find an interpreter that has vLLM: the one named, else this one.

    Returns:
        The interpreter, or one line that says why vLLM is left out.

    Raises:
        ConfigError: the interpreter named is not there, or cannot import vLLM.
    """
    python = Path(named or sys.executable).expanduser()
    if named and not python.is_file():
        raise ConfigError(f"bench.vllm_python={named}: no such file; expected a Python interpreter")
    words = [
        str(python),
        "-c",
        "import importlib.util as u; print(u.find_spec('vllm') is not None)",
    ]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.stdout.strip() == "True":
        return python
    if named:
        raise ConfigError(f"bench.vllm_python={named}: that interpreter has no vllm installed")
    return "vLLM: left out, not installed here; bench.vllm_python=PATH names a Python that has it"


def time_vllm(
    python: Path,
    target: "Target",
    settings: "TargetSettings",
    prompts: Sequence[Sequence[int]],
    tokens: int,
    repeats: int,
) -> "list[Timing]":
    """Time both arms of vLLM on the same prompts and limits.

    Args:
        python: has vLLM.
        target: the same weights are given to vLLM.
        settings: where those come from.
        prompts: token ids.
        tokens: length limit of an answer.
        repeats: times each prompt is timed.

    Raises:
        DraftlabError: vLLM failed, with its last line.
    """
    from draftlab.decoding.records import Generation, StepRecord
    from draftlab.evaluation.speed import Timing

    made = []
    with tempfile.TemporaryDirectory(prefix="draftlab-vllm-") as folder:
        model, revision = _place_of(target, settings, Path(folder) / "model")
        asked: dict[str, Any] = {
            "model": model,
            "revision": revision,
            "dtype": target.spec.dtype,
            "prompts": [list(ids) for ids in prompts],
            "max_new_tokens": tokens,
            "max_length": max(map(len, prompts)) + tokens + 1,
            "eos_ids": list(target.spec.eos_ids),
            "warmup_prompts": _WARMUP_PROMPTS,
            "repeats": repeats,
        }
        for arm, drafts in _ARMS.items():
            print(f"{arm}: in a process of its own", flush=True)
            found = _ask(python, asked | {"ngram_tokens": drafts}, Path(folder))
            for repeat, answers in enumerate(found["answers"]):
                for index, (ids, seconds) in enumerate(answers):
                    rest = StepRecord(0, 0, len(ids) - 1, (), 0.0, seconds, 0.0, 1)
                    answer = Generation(
                        prompt_index=index,
                        prompt_ids=tuple(prompts[index]),
                        output_ids=tuple(ids),
                        finish="eos" if ids[-1] in target.spec.eos_ids else "length",
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
    target.tokenizer.save_pretrained(folder)
    return str(folder), None


def _ask(python: Path, asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    given, answered = folder / "asked.json", folder / "answered.json"
    given.write_text(json.dumps(asked), encoding="utf-8")
    answered.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    words = [str(python), str(_CHILD), str(given), str(answered)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0 or not answered.is_file():
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DraftlabError(f"vLLM ({python}) failed: {last[0]}; leave bench.vllm_python out")
    return json.loads(answered.read_text(encoding="utf-8"))
