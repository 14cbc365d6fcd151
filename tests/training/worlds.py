"""Several processes of a worker script that train together on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

_PATIENCE_S = 300  # a machine with other work starts processes slowly


def run_world(mode: str, out: Path, *, processes: int, worker: str = "training_worker.py") -> None:
    """Run a mode of the worker in so many processes; all must end well."""
    shared = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "ACCELERATE_USE_CPU": "true",
    }
    script = Path(__file__).with_name(worker)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), mode, str(out)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    try:
        codes = [rank.wait(timeout=_PATIENCE_S) for rank in ranks]
        assert codes == [0] * processes, f"the ranks ended with {codes}"
    finally:
        for rank in ranks:
            rank.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
