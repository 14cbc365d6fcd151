"""The command as a person runs it: a process of its own, in a folder of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from draftlab.runs.run_dir import RunDir, list_runs

_TIMEOUT_S = 400  # a machine with other work starts processes slowly


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start `draftlab WORDS` in a folder, with further variables in its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "draftlab.cli.main", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for its end; give the exit code and all it said."""
    try:
        said, _ = process.communicate(timeout=_TIMEOUT_S)
    finally:
        stop(process)
    return process.returncode, said


def run(folder: Path, *words: str) -> str:
    """Run `draftlab WORDS` in a folder, which must go well; give what it said."""
    code, said = finish(start(folder, *words))
    assert code == 0, said
    return said


def kill_when(process: subprocess.Popen[str], is_time: Callable[[], bool]) -> None:
    """Send SIGKILL as soon as something is there; the process must still be at work then."""
    wait_until(process, is_time)
    process.kill()
    code, said = finish(process)
    assert code == -signal.SIGKILL, said


def wait_until(process: subprocess.Popen[str], is_time: Callable[[], bool]) -> None:
    """Wait for something that a running process does."""
    end = time.monotonic() + _TIMEOUT_S
    while not is_time():
        assert process.poll() is None, finish(process)[1]
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def stop(process: subprocess.Popen[str]) -> None:
    """End a process and all it started."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def only_run(outputs: Path) -> RunDir:
    """Give the one run there is."""
    (found,) = list_runs(outputs)
    return found
