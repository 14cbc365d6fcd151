"""How a run starts: composed once here, then done by one process or several from the run folder.

In: the words of a command line. Out: a finished `RunDir`. Workers read RUN/config.yaml and never
see Hydra, so every rank has the same settings and the same folder.
"""

import hashlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from draftlab.cli.adapting import require_base, require_rank
from draftlab.cli.continuing import take_over_drafter
from draftlab.cli.drafters import find_drafter_folder, may_be_hub_id
from draftlab.cli.estimate import Estimate, estimate_run, require_disk, require_training
from draftlab.cli.hardware import (
    apply_hardware,
    is_first_machine,
    launcher_command,
    launcher_environment,
    require_threads,
)
from draftlab.cli.measure import require_decoding
from draftlab.cli.schema import RunSettings, settings_of
from draftlab.cli.worker import LAUNCHED, read_run_settings, work
from draftlab.drafters.store import check_whole
from draftlab.errors import CheckpointError, ConfigError, DraftlabError
from draftlab.runs.provenance import collect_provenance
from draftlab.runs.run_dir import RunDir, create_run, list_runs, open_run, write_json
from draftlab.runs.trackers import require_tracker
from draftlab.settings.compose import Composed, compose

RUN_ID = "DRAFTLAB_RUN_ID"
_MEETING_S = 600
_LOOK_EVERY_S = 0.5


def launch_training(words: Sequence[str]) -> RunDir:
    """Train as the words say: a new run, or the rest of an interrupted one.

    Args:
        words: key=value words.

    Raises:
        DraftlabError: the words do not compose, what they name is not there, a finished run's
            drafter is gone or damaged, or a worker failed.
        KeyboardInterrupt: with the command that goes on.
    """
    run, settings = prepare_run(words)
    if run.is_finished:
        _require_result(run)
        return run
    try:
        if settings.hardware.num_processes == 1:
            work(run)
        else:
            _work_in_processes(run, settings)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_resume_command(run)) from None
    return run


def prepare_run(words: Sequence[str]) -> tuple[RunDir, RunSettings]:
    """Compose, check, and find or make the run folder; nothing heavy happens before.

    Raises:
        DraftlabError: the words do not compose, or what they name is not there.
    """
    named = [word for word in words if word.startswith("resume=")]
    if named and named[-1] not in ("resume=auto", "resume=never"):
        return _reopen(named[-1].partition("=")[2], [word for word in words if word not in named])
    settings, composed = compose_run(words)
    digest = _digest(settings)
    family = settings.paths.outputs / (composed.recipe or "adhoc")
    if settings.hardware.accelerate_config is not None:
        return _meet_machines(settings, family, digest)
    if settings.resume == "auto" and (run := _interrupted_run(family, digest)):
        return run, read_run_settings(run)
    return _begin(settings, family, digest)


def _begin(
    settings: RunSettings, family: Path, digest: str, run_id: str | None = None
) -> tuple[RunDir, RunSettings]:
    require_training(require_inputs(settings), settings.drafter.kind)
    settings = _decide(settings)
    run = create_run(family.parent, family.name, run_id=run_id)
    provenance = collect_provenance(seed=settings.seed)
    write_json(run.provenance_path, {**provenance, "settings_sha256": digest})
    run.write_config(settings.model_dump(mode="json"))
    return run, settings


def _meet_machines(settings: RunSettings, family: Path, digest: str) -> tuple[RunDir, RunSettings]:
    """Let several machines that were given the same words find the same run folder.

    The first machine makes it, or finds it again after an interruption; the others wait for it.
    """
    name = os.environ.get(RUN_ID, "")
    if Path(name).name != name or name in ("", ".."):
        raise ConfigError(
            f"several machines train together (hardware.accelerate_config), and {RUN_ID}={name!r} "
            f"does not tell them which run; set {RUN_ID} to one word, the same on all, such as the "
            "job's id"
        )
    run = RunDir(family / name)
    if not is_first_machine(settings.hardware):
        deadline = time.monotonic() + _MEETING_S
        while not run.config_path.is_file():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the first machine did not make {run.path} within {_MEETING_S} s; see what "
                    "it says, and whether paths.outputs is the same folder on all machines"
                )
            time.sleep(_LOOK_EVERY_S)
    elif not run.config_path.is_file():
        return _begin(settings, family, digest, run_id=name)
    saved = json.loads(run.provenance_path.read_text(encoding="utf-8"))
    if saved.get("settings_sha256") != digest:
        raise ConfigError(
            f"{run.path} was begun with other settings; give all machines the same words, and a "
            f"new run a new {RUN_ID}"
        )
    return run, read_run_settings(run)


def compose_run(words: Sequence[str]) -> tuple[RunSettings, Composed]:
    """Compose and check the settings of a training run.

    Raises:
        ConfigError: the words do not compose, give a trained drafter as the kind, or ask for other
            settings than those of the drafter to start from.
        CheckpointError: the drafter to start from is damaged.
    """
    composed = compose("train", words)
    name = composed.data.get("drafter")
    if isinstance(name, str):
        raise ConfigError(
            f"drafter={name} names a trained drafter, and training starts from a kind; to train "
            f"it further pass init={name}"
        )
    settings = take_over_drafter(settings_of(RunSettings, composed), composed, words)
    return settings, composed


def require_inputs(settings: RunSettings, *, asks_hub: bool = False) -> Estimate:
    """Refuse what cannot work before anything heavy happens or a folder is made.

    Args:
        settings: everything the run is.
        asks_hub: fetch the config.json of hub models, for a better estimate.

    Returns:
        What the run will take.

    Raises:
        DataError: a missing data file, lines that cannot be read, or nothing to learn.
        ConfigError: adapters on nothing or of a rank beyond its matrices, more threads than cores,
            no such target, a law that is none, a tracker that is not installed, kernels that a cut
            target does not have, a folder that cannot be written, or a disk too small.
        CheckpointError: the drafter to start from is damaged.
    """
    require_decoding(settings.decode)
    require_threads(settings.hardware)
    require_tracker(settings.tracker)
    require_base(settings)
    if settings.init is not None and not may_be_hub_id(settings.init):
        check_whole(find_drafter_folder(settings.init))
    if settings.hardware.cuts_target:
        from draftlab.targets.load import refuse_fast_shards

        refuse_fast_shards(settings.target)
    estimate = estimate_run(settings, asks_hub=asks_hub)
    require_rank(settings, estimate.outline)
    require_disk(estimate, settings.paths.outputs)
    return estimate


def _decide(settings: RunSettings) -> RunSettings:
    """Decide once what the machine decides: threads, device, dtype. A resumed run repeats it."""
    from draftlab.targets.load import resolve

    apply_hardware(settings.hardware, places_drafters=True)
    return settings.model_copy(
        update={"hardware": settings.hardware.resolved(), "target": resolve(settings.target)}
    )


def _reopen(name: str, others: list[str]) -> tuple[RunDir, RunSettings]:
    try:
        run = open_run(name)
    except CheckpointError as error:
        raise CheckpointError(
            f"resume={name}: expected auto, never or a run's folder; {error}"
        ) from None
    if others:
        raise ConfigError(
            f"a resumed run keeps its settings: drop {' '.join(others)}; to train its drafter "
            f"further with other settings pass init={name} instead of resume={name}"
        )
    return run, read_run_settings(run)


def _require_result(run: RunDir) -> None:
    """Refuse to call a finished run done when its drafter is gone or damaged."""
    try:
        folder = run.pointed("best") or run.pointed("latest")
        if folder is None:
            raise CheckpointError(f"{run.checkpoints_path} has no checkpoint any more")
        check_whole(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"run {run.path} is finished, so there is nothing to go on with, and its drafter "
            f"cannot be used: {error}; to train anew, give the command in {run.provenance_path} "
            "again, with resume=never"
        ) from None


def _resume_command(run: RunDir) -> str:
    return shlex.join(["draftlab", "train", f"resume={run.path}"])


def _digest(settings: RunSettings) -> str:
    data = settings.model_dump(mode="json", exclude={"resume"})
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _interrupted_run(family: Path, digest: str) -> RunDir | None:
    """Find the newest run of these settings that stopped before its end and is not running now."""
    for run in reversed(list_runs(family)):
        if run.is_finished or not run.provenance_path.is_file():
            continue
        saved = json.loads(run.provenance_path.read_text(encoding="utf-8"))
        if saved.get("settings_sha256") == digest and not run.is_running:
            return run
    return None


def _work_in_processes(run: RunDir, settings: RunSettings) -> None:
    words = ["draftlab.cli.worker", str(run.path)]
    environment = launcher_environment(settings.hardware)
    # the workers of the first machine end when this process lets go, however it ends; those of
    # others when they lose the first: a lock may not be seen over a network
    is_first = is_first_machine(settings.hardware)
    with run.hold() if is_first else nullcontext():
        done = subprocess.run(
            launcher_command(settings.hardware, words),
            env=environment | {LAUNCHED: "1"} if is_first else environment,
            check=False,
        )
    if done.returncode != 0:
        kind = ConfigError if done.returncode == ConfigError.exit_code else DraftlabError
        raise kind(
            f"a worker of {run.path} failed (exit code {done.returncode}); what it said stands "
            f"above and in {run.log_path}; to go on: {_resume_command(run)}"
        )
