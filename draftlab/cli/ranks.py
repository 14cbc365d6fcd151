"""`python -m draftlab.cli.ranks ARGS`: Accelerate's launcher, with the exit code of the rank.

The launcher itself ends with 1 and a traceback whatever a rank said; a rank that refused its input
has said why already, in one line.
"""

import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: list[str]) -> int:
    """Start the ranks and wait for them."""
    try:
        launch_command(launch_command_parser().parse_args(argv))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 1  # negative: ended by a signal
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
