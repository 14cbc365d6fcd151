"""Where what was measured is kept: in the run that a drafter belongs to, or in a run of its own.

Nothing that was measured before is overwritten, and beside it stands the command that measured it.
Read first: find_home, own_run, free_suite.
"""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from draftlab.cli.drafters import find_owning_run
from draftlab.cli.schema import CommandSettings
from draftlab.drafters.base import DrafterSettings
from draftlab.runs.provenance import collect_provenance
from draftlab.runs.run_dir import PROVENANCE, RunDir, create_run, write_json
from draftlab.targets.settings import TargetSettings

# which target it is; dtype, device and kernels are how it runs
_IDENTITY = ("source", "name", "revision", "family", "seed")


def find_home(
    names: Sequence[str | DrafterSettings], settings: CommandSettings, words: Sequence[str]
) -> RunDir | None:
    """Find the run that holds what is measured: that of the first drafter that belongs to one.

    Args:
        names: the drafters, as they were named.
        settings: the command's, complete.
        words: as typed: `paths.outputs` counts only when it stands there.

    Returns:
        The run; None where a run of its own is to be made: no drafter belongs to a run, the target
        is another than the run's, or the run lies outside the folder that was typed.
    """
    found = (find_owning_run(name) for name in names if isinstance(name, str))
    home = next((run for run in found if run is not None), None)
    if home is None:
        return None
    other = _other_target(home, settings.target)
    if other:
        print(f"kept in a run of its own: {home.path} is of another target ({other})")
        return None
    outputs = settings.paths.outputs
    is_typed = any(word.startswith(("paths.outputs=", "paths=")) for word in words)
    if is_typed and not _lies_in(home.path, outputs):
        print(f"kept in a run of its own, in {outputs}")
        return None
    return home


@contextmanager
def own_run(settings: CommandSettings, name: str) -> Iterator[RunDir]:
    """Make a run for what is measured, and mark it finished at the end.

    It is held meanwhile. A run that ends without any result leaves no folder.

    Args:
        settings: the command's, written into config.yaml.
        name: the command's.
    """
    run = create_run(settings.paths.outputs, name)
    try:
        with run.hold():
            run.write_config(settings.model_dump(mode="json"))
            write_json(run.provenance_path, collect_provenance(seed=settings.seed))
            yield run
            run.mark_finished()
    except BaseException:
        if not any(run.path.glob("eval/*/summary.json")):
            shutil.rmtree(run.path)
        raise


def free_suite(run: RunDir, suite: str) -> str:
    """Give an evaluation the first free name: the suite's, else SUITE-2, SUITE-3, ...

    One that was stopped before it had a result left its provenance only, and takes no name.
    """
    names = itertools.chain([suite], (f"{suite}-{i}" for i in itertools.count(2)))
    return next(name for name in names if not _holds_results(run.eval_path(name)))


@contextmanager
def note_provenance(folder: Path, *, seed: int, goes_on: bool) -> Iterator[None]:
    """Write into an evaluation's folder which command makes it, with which versions, and when.

    It stands there before the work begins. An evaluation that is made anew in the same folder
    brings its own when it has its results: until then the earlier ones are there.

    Args:
        folder: the evaluation's.
        seed: the evaluation's.
        goes_on: with an earlier stage, whose provenance stays.
    """
    provenance, path = collect_provenance(seed=seed), folder / PROVENANCE
    is_anew = _holds_results(folder)
    if not goes_on and not is_anew:
        write_json(path, provenance)
    yield
    if not goes_on and is_anew:
        write_json(path, provenance)


def _holds_results(folder: Path) -> bool:
    return folder.is_dir() and any(path.name != PROVENANCE for path in folder.iterdir())


def _other_target(run: RunDir, target: TargetSettings) -> str:
    """Name what makes the target another than the run's; empty where it is the same."""
    saved, given = run.read_config().get("target") or {}, target.model_dump(mode="json")
    return ", ".join(
        f"target.{key}: {saved.get(key)} there, {given[key]} here"
        for key in _IDENTITY
        if saved.get(key) != given[key]
    )


def _lies_in(path: Path, folder: Path) -> bool:
    return path.expanduser().resolve().is_relative_to(folder.expanduser().resolve())
