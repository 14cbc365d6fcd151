"""provenance.json: the command, code, versions and machine behind a run's numbers.

The environment is never dumped, and the values of secret variables are struck out wherever they
would appear.
"""

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from draftlab.settings.locate import checkout_dir

_PACKAGES = (
    "draftlab",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "safetensors",
    "numpy",
)
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def collect_provenance(*, seed: int, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Describe this run's code and machine as plain data.

    Args:
        seed: the run's root of randomness.
        argv: the command; this process's when None.
    """
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": strike_secrets(shlex.join(argv if argv is not None else sys.argv)),
        "seed": seed,
        "code": describe_code(),
        "versions": describe_versions(),
        "machine": describe_machine(),
    }


def strike_secrets(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Replace the value of every secret environment variable in a text.

    Args:
        text: what would be recorded.
        environ: this process's environment when None.
    """
    for name, value in (os.environ if environ is None else environ).items():
        # a short value could be a common word; real keys are long
        if len(value) >= 8 and any(word in name.upper() for word in _SECRET_WORDS):
            text = text.replace(value, f"<{name}>")
    return text


def describe_code() -> dict[str, Any]:
    """Give the git commit of a checkout and a hash of its uncommitted changes; else nulls."""
    root = checkout_dir()
    commit = _git(root, "rev-parse", "HEAD") if root else None
    changes = _git(root, "diff", "HEAD") if root and commit else None
    return {
        "git_commit": commit.decode().strip() if commit else None,
        "git_changes_sha256": hashlib.sha256(changes).hexdigest() if changes else None,
    }


def describe_versions() -> dict[str, str | None]:
    """Give the versions of Python and of the packages that make the numbers."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def describe_machine() -> dict[str, Any]:
    """Give processor, cores, memory, threads and GPUs."""
    torch = sys.modules.get("torch")  # threads are known once torch runs; never load it for this
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_features": cpu_features(),
        "cores": num_cores(),
        "memory_bytes": memory_bytes(),
        "torch_threads": torch.get_num_threads() if torch else None,
        "gpus": describe_gpus(),
    }


def num_cores() -> int:
    """Count the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Give the processor's name."""
    for line in _proc_lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """List the vector features of the processor that decide how fast a forward pass is."""
    wanted = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "bf16", "asimd", "sve"}
    for line in _proc_lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            return sorted(wanted & set(line.partition(":")[2].split()))
    return []


def memory_bytes() -> int | None:
    """Give the machine's main memory in bytes; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def describe_gpus() -> list[dict[str, Any]]:
    """Give name, memory and driver of each NVIDIA GPU; an empty list, quietly, without one."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # of nvidia-ml-py, optional
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            name = _text(pynvml.nvmlDeviceGetName(handle))
            gpus.append({"name": name, "memory_bytes": int(memory), "driver": driver})
        return gpus
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _proc_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _git(root: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
