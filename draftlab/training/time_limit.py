"""How many optimizer steps a time limit allows: measured before the first, and looked at again.

A machine that happens to be busy when a training starts would give all of it too few steps, and one
that is idle only then too many. So the pace is looked at again whenever a fifth of the steps that
were left is done. The plan keeps every look that changed it. A resumed training follows the plan as
it stands and looks no more: what it does must not hang on when it was killed.
"""

from collections.abc import Callable

from scipy.stats import trim_mean

_MIN_REHEARSALS = 3
_MAX_REHEARSALS = 20
_REHEARSAL_SHARE = 0.02  # of the time limit may go into measuring it

_LOOK_SHARE = 0.2  # of the steps left, done since the last look
_MIN_STEPS = 5  # that a look counts
_TRIMMED = 0.2  # of them at either end: a machine that slept tells nothing of the steps to come


class TimeLimit:
    """Counts what optimizer steps take, and says how many fit into the minutes given."""

    def __init__(self, minutes: float, *, agree: Callable[[float], float]) -> None:
        """Start with nothing measured.

        Args:
            minutes: for optimizer steps; probes and checkpoints come on top.
            agree: gives the first process's number to all.
        """
        self._seconds = 60 * minutes
        self._agree = agree
        self._spent = 0.0
        self._counted: list[float] = []

    def measure(self, rehearse: Callable[[int], float]) -> int:
        """Measure how many optimizer steps fit, by doing some without effect.

        The first one pays for warming up and is not counted; the time all of them took is taken
        off.

        Args:
            rehearse: does step number n (1..) without changing anything; returns seconds.
        """
        self._spent = rehearse(1)
        times = [rehearse(1 + n) for n in range(1, _MIN_REHEARSALS + 1)]
        mean = self._agree(sum(times) / len(times))
        more = min(_MAX_REHEARSALS, int(_REHEARSAL_SHARE * self._seconds / mean)) - _MIN_REHEARSALS
        times += [rehearse(1 + _MIN_REHEARSALS + n) for n in range(1, more + 1)]
        self._spent += sum(times)
        return self._fit(sum(times) / len(times))

    def add_step(self, seconds: float) -> None:
        """Take in one optimizer step."""
        self._spent += seconds
        self._counted.append(seconds)

    def is_due(self, step: int, total: int) -> bool:
        """Tell whether to look again, the same on every process.

        Args:
            step: optimizer steps done.
            total: that are planned.
        """
        num_counted = len(self._counted)
        return step < total and num_counted >= max(_MIN_STEPS, _LOOK_SHARE * (total - step))

    def look(self, step: int) -> int:
        """Compute the optimizer steps that fit in all, by the pace since the last look.

        Args:
            step: optimizer steps done.
        """
        pace = float(trim_mean(self._counted, _TRIMMED))
        self._counted = []
        return step + self._fit(pace)

    def _fit(self, pace: float) -> int:
        return max(1, int(self._agree((self._seconds - self._spent) / pace)))
