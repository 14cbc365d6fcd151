"""`python -m draftlab.cli.worker RUN`: one process of a run, whole or one rank of several.

Knows the run by its folder alone.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

from draftlab.cli.disk import explain_refusal
from draftlab.cli.hardware import apply_hardware
from draftlab.cli.schema import RunSettings
from draftlab.errors import DraftlabError
from draftlab.runs.run_dir import RunDir, open_run
from draftlab.settings.base import parse_settings

LAUNCHED = "DRAFTLAB_LAUNCHED"  # set where `draftlab train` holds the run while its workers work
_LOOK_EVERY_S = 1.0


def read_run_settings(run: RunDir) -> RunSettings:
    """Read and check RUN/config.yaml."""
    return parse_settings(RunSettings, run.read_config())


def work(run: RunDir) -> None:
    """Do this process's share of a training run; the first rank marks it finished.

    Raises:
        CheckpointError: another process is writing the run.
    """
    from draftlab.cli.train_job import run_training

    settings = read_run_settings(run)
    is_launched = LAUNCHED in os.environ
    if is_launched:
        _end_with_launcher(run)
    apply_hardware(settings.hardware, places_drafters=True)
    if not _is_first_rank():
        logging.getLogger("draftlab").setLevel(logging.WARNING)
        run_training(run, settings)
        return
    with contextlib.nullcontext() if is_launched else run.hold(), _logging_to(run):
        run_training(run, settings)
        run.mark_finished()


def main(argv: list[str]) -> int:
    """Run one rank that the launcher started."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("draftlab").setLevel(logging.INFO)
    try:
        work(open_run(argv[0]))
    except DraftlabError as error:
        print(f"draftlab train: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        said = explain_refusal(error)
        if said is None:
            raise
        print(f"draftlab train: {said}", file=sys.stderr)
        return 1
    from draftlab.training.processes import leave_group

    leave_group()
    return 0


def _end_with_launcher(run: RunDir) -> None:
    """End this process when the one that launched it is gone, killed or not.

    Left alone it would go on training, and the same command would not find an interrupted run.
    """

    def watch() -> None:
        while run.is_running:
            time.sleep(_LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def _logging_to(run: RunDir) -> Iterator[None]:
    handler = logging.FileHandler(run.log_path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("draftlab")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    from draftlab.training.processes import end_process

    end_process(code)
