"""`python -m draftlab.cli.worker RUN`: one process of a run, whole or one rank of several.

Knows the run by its folder alone.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from draftlab.cli.hardware import apply_hardware
from draftlab.cli.schema import RunSettings
from draftlab.errors import DraftlabError
from draftlab.runs.run_dir import RunDir, open_run
from draftlab.settings.base import parse_settings


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
    apply_hardware(settings.hardware)
    if not _is_first_rank():
        logging.getLogger("draftlab").setLevel(logging.WARNING)
        run_training(run, settings)
        return
    with run.hold(), _logging_to(run):
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
    return 0


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
    sys.exit(main(sys.argv[1:]))
