"""Runs every seeded bug against its tests and writes the table into the README.

Run as `python -m tests.proofs.mutants.run` from the project's root, or `make mutants`. Each bug
goes into a copy of the project in a temporary folder; nothing here is changed but the README's
table. Heavy third-party packages are imported once; every run is a fork of that process, so a bug
costs seconds. A first run without any bug shows that the tests pass as they stand.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.proofs.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- mutants: written by `make mutants` -->", "<!-- /mutants -->"
COPIED = ("draftlab", "conf", "recipes", "tests")
LIMIT_S = 180
JUNK = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache")


class Recorder:
    """A pytest plugin that keeps the first failure."""

    def __init__(self) -> None:
        self.failed = None
        self.count = 0
        self.broken = None

    def pytest_collectreport(self, report) -> None:
        if report.failed and self.broken is None:
            self.broken = report.nodeid or "collection"

    def pytest_runtest_logreport(self, report) -> None:
        self.count += report.when == "call"
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def make_copy(folder: Path, mutant: Mutant | None) -> None:
    """Copy the project, with one bug in it.

    Raises:
        LookupError: the text to replace does not stand in its file exactly once.
    """
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=JUNK)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    if mutant is None:
        return
    path = folder / "draftlab" / mutant.file
    text = path.read_text(encoding="utf-8")
    if (found := text.count(mutant.old)) != 1:
        raise LookupError(
            f"mutant {mutant.name!r}: its text stands {found} times in draftlab/{mutant.file}, "
            "expected once; bring the catalogue up to date"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run_tests(folder: Path, arguments: list[str], *, stop_at_first: bool) -> None:
    """Run pytest inside a copy; write what happened next to it. In a process of its own."""
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(folder)]
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "draftlab")]:
        del sys.modules[name]
    import pytest

    recorder = Recorder()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--assert=plain"]
    options += ["-x"] if stop_at_first else []
    with open(folder / "log", "w") as log, contextlib.redirect_stdout(log):
        code = int(pytest.main([*options, *arguments], plugins=[recorder]))
    import draftlab

    assert Path(draftlab.__file__).is_relative_to(folder), draftlab.__file__
    answer = {
        "code": code,
        "failed": recorder.failed,
        "broken": recorder.broken,
        "count": recorder.count,
    }
    (folder / "answer.json").write_text(json.dumps(answer))


def start(folder: Path, mutant: Mutant | None, arguments: list[str]) -> int:
    """Fork a run; give its process id."""
    make_copy(folder, mutant)
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        run_tests(folder, arguments, stop_at_first=mutant is not None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def judge(folder: Path) -> tuple[bool, str, int]:
    """Tell whether a run's bug was seen, by which test, and how many tests that took."""
    path = folder / "answer.json"
    if not path.exists():
        return True, f"no end within {LIMIT_S} s, or a crash", 0
    answer = json.loads(path.read_text())
    if answer["broken"] or answer["code"] not in (0, 1):
        log = (folder / "log").read_text()[-2000:]
        raise RuntimeError(f"pytest did not get to run tests: {answer}\n{log}")
    return answer["failed"] is not None, answer["failed"] or "", answer["count"]


def run_all(mutants: list[Mutant], processes: int) -> list[dict]:
    """Run every bug, some at a time; give results in the catalogue's order."""
    results: dict[int, dict] = {}
    waiting, running = list(enumerate(mutants)), {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as top:
        while waiting or running:
            while waiting and len(running) < processes:
                number, mutant = waiting.pop(0)
                folder = Path(top, str(number))
                child = start(folder, mutant, list(mutant.tests))
                running[child] = (number, mutant, folder, time.monotonic())
            done, _ = os.waitpid(-1, os.WNOHANG)
            if done == 0:
                for child, (_, _, _, began) in running.items():
                    if time.monotonic() - began > LIMIT_S:
                        os.killpg(child, 9)
                time.sleep(0.05)
                continue
            number, mutant, folder, began = running.pop(done)
            killed, by, count = judge(folder)
            took = time.monotonic() - began
            results[number] = {"mutant": mutant, "killed": killed, "by": by, "seconds": took}
            word = "killed  " if killed else "SURVIVED"
            print(f"{word} {took:5.1f} s  {mutant.name}  [{by or f'{count} tests passed'}]", flush=True)
            shutil.rmtree(folder)
    return [results[number] for number in range(len(mutants))]


def check_tests_pass(mutants: list[Mutant], processes: int) -> None:
    """Run the tests of all bugs on an unchanged copy: one that fails anyway would prove nothing."""
    jobs = sorted({mutant.tests for mutant in mutants})
    running: dict[int, tuple] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as top:
        for number, tests in enumerate([*jobs, *[None] * processes]):
            if len(running) == processes or tests is None:
                if not running:
                    break
                done, _ = os.waitpid(-1, 0)
                folder, arguments = running.pop(done)
                failed, by, count = judge(folder)
                if failed or not count:
                    raise SystemExit(
                        f"without any bug: {by or 'no test was run'} of {' '.join(arguments)}"
                    )
                shutil.rmtree(folder)
            if tests is not None:
                folder = Path(top, str(number))
                running[start(folder, None, list(tests))] = (folder, tests)
    print(f"without any bug: all tests of {len(jobs)} selections pass", flush=True)


def table_of(results: list[dict]) -> str:
    """Write the README's table."""
    killed = sum(result["killed"] for result in results)
    lines = [
        BEGIN,
        "",
        f"**{killed} of {len(results)} seeded bugs are seen** by the tests (`make mutants`):",
        "",
        "| bug put into a copy | file | seen by |",
        "|---|---|---|",
    ]
    for result in results:
        mutant = result["mutant"]
        by = re.sub(r"\[.*\]$", "", result["by"]).split("/")[-1].replace("::", ": ")
        by = by.replace(".py: test_", ": ").replace("_", " ")
        seen = by if result["killed"] else "**no test**"
        lines.append(f"| {mutant.name} | `{mutant.file}` | {seen} |")
    return "\n".join([*lines, "", END])


def write_table(path: Path, table: str) -> None:
    """Put the table between its marks.

    Raises:
        LookupError: the marks are not there.
    """
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise LookupError(f"{path.name} has no place for the table: expected {BEGIN} ... {END}")
    before, rest = text.split(BEGIN)
    fresh = path.with_suffix(".new")
    fresh.write_text(before + table + rest.split(END)[1], encoding="utf-8")
    fresh.replace(path)


def warm_up() -> None:
    """Import what every run needs and no bug is in."""
    import beartype
    import hypothesis
    import jaxtyping
    import numpy
    import pydantic
    import pytest
    import scipy.stats
    import tokenizers
    import torch
    import transformers
    import yaml
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    kept = (beartype, hypothesis, jaxtyping, numpy, pydantic, pytest, scipy, tokenizers, yaml)
    assert all((*kept, transformers, AutoModelForCausalLM, PreTrainedTokenizerFast))


def main() -> int:
    """Run the catalogue; 1 when a bug was not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="bugs whose name has this; README unchanged")
    parser.add_argument("--no-control", action="store_true", help="skip the run without a bug")
    given = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if given.only in mutant.name]
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    warm_up()
    if not given.no_control:
        check_tests_pass(mutants, given.processes)
    results = run_all(mutants, given.processes)
    survivors = [result["mutant"].name for result in results if not result["killed"]]
    print(
        f"{len(results) - len(survivors)} of {len(results)} killed in "
        f"{time.monotonic() - began:.0f} s"
    )
    if not given.only:
        write_table(ROOT / "README.md", table_of(results))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
