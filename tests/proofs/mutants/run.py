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
import shutil
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from tests.proofs.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- mutants: written by `make mutants` -->", "<!-- /mutants -->"
COPIED = ("draftlab", "conf", "recipes", "tests")
LIMIT_S = 180
JUNK = shutil.ignore_patterns("*.pyc.*", ".pytest_cache")


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


def copy_project(folder: Path) -> None:
    """Copy the project once, compiled files included: later copies are of this one."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=JUNK)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)


def check_texts(project: Path, mutants: list[Mutant]) -> None:
    """Refuse a list that is out of date.

    Raises:
        LookupError: a text to replace does not stand in its file exactly once.
    """
    stale = []
    for mutant in mutants:
        path = project / "draftlab" / mutant.file
        found = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
        if found != 1:
            stale.append(
                f"{mutant.name!r}: its text stands {found} times in draftlab/{mutant.file}"
            )
    if stale:
        raise LookupError(
            "seeded bugs whose text must stand once; bring catalogue.py up to date:\n  "
            + "\n  ".join(stale)
        )


def make_copy(project: Path, folder: Path, mutant: Mutant | None) -> None:
    """Copy the project, with one bug in it."""
    shutil.copytree(project, folder)
    if mutant is None:
        return
    path = folder / "draftlab" / mutant.file
    text = path.read_text(encoding="utf-8")
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
    # shapes are not checked here: what kills a bug is what it does, and imports are faster
    options += ["-o", "addopts=--strict-markers"]
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


def start(project: Path, folder: Path, mutant: Mutant | None, arguments: list[str]) -> int:
    """Fork a run; give its process id."""
    make_copy(project, folder, mutant)
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


def run_jobs(
    project: Path, jobs: list[tuple[Mutant | None, tuple[str, ...]]], processes: int
) -> Iterator[tuple[int, bool, str, int, float]]:
    """Run jobs, some at a time; yield (job, killed, by what, tests run, seconds) as they end."""
    waiting, running = deque(enumerate(jobs)), {}
    while waiting or running:
        while waiting and len(running) < processes:
            number, (mutant, tests) = waiting.popleft()
            folder = project.parent / str(number)
            child = start(project, folder, mutant, list(tests))
            running[child] = (number, folder, time.monotonic())
        done, _ = os.waitpid(-1, os.WNOHANG)
        if done:
            number, folder, began = running.pop(done)
            yield number, *judge(folder), time.monotonic() - began
            shutil.rmtree(folder)
            continue
        for child, (_, _, began) in running.items():
            if time.monotonic() - began > LIMIT_S:
                os.killpg(child, 9)
        time.sleep(0.05)


def check_tests_pass(project: Path, mutants: list[Mutant], processes: int) -> None:
    """Run the tests of all bugs on an unchanged copy: one that fails anyway would prove nothing."""
    selections = sorted({mutant.tests for mutant in mutants})
    jobs = [(None, tests) for tests in selections]
    for number, failed, by, count, _ in run_jobs(project, jobs, processes):
        if failed or not count:
            words = " ".join(selections[number])
            raise SystemExit(f"without any bug: {by or 'no test was run'} of {words}")
    print(f"without any bug: all tests of {len(selections)} selections pass", flush=True)


def run_mutants(project: Path, mutants: list[Mutant], processes: int) -> list[tuple[bool, str]]:
    """Run every bug; give whether it was seen, and by what, in the catalogue's order."""
    results: list[tuple[bool, str]] = [(False, "")] * len(mutants)
    jobs = [(mutant, mutant.tests) for mutant in mutants]
    for number, killed, by, count, took in run_jobs(project, jobs, processes):
        results[number] = (killed, by)
        word = "killed  " if killed else "SURVIVED"
        seen = by or f"{count} tests passed"
        print(f"{word} {took:5.1f} s  {mutants[number].name}  [{seen}]", flush=True)
    return results


def table_of(mutants: list[Mutant], results: list[tuple[bool, str]]) -> str:
    """Write the README's table."""
    killed = sum(was_seen for was_seen, _ in results)
    lines = [
        BEGIN,
        "",
        f"<details><summary>{killed} of {len(results)} seeded bugs are seen by the tests "
        "(make mutants)</summary>",
        "",
        "| bug put into a copy | file | seen by |",
        "|---|---|---|",
    ]
    for mutant, (was_seen, by) in zip(mutants, results, strict=True):
        file, _, test = by.partition("[")[0].rpartition("/")[2].partition(".py::test_")
        words = f"{file.removeprefix('test_')}: {test}".replace("_", " ")
        seen = (words if test else by) if was_seen else "**no test**"
        lines.append(f"| {mutant.name} | `{mutant.file}` | {seen} |")
    return "\n".join([*lines, "", "</details>", "", END])


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
    with tempfile.TemporaryDirectory(prefix="mutants-") as top:
        project = Path(top, "project")
        copy_project(project)
        check_texts(project, mutants)
        if not given.no_control:
            check_tests_pass(project, mutants, given.processes)
        results = run_mutants(project, mutants, given.processes)
    survivors = [m.name for m, (was_seen, _) in zip(mutants, results, strict=True) if not was_seen]
    print(
        f"{len(results) - len(survivors)} of {len(results)} killed in "
        f"{time.monotonic() - began:.0f} s"
    )
    if not given.only:
        write_table(ROOT / "README.md", table_of(mutants, results))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
