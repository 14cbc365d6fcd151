"""How many optimizer steps a time limit allows: measured before the first, and looked at again.

A machine that happens to be busy when a training starts would give all of it too few steps, and one
that is idle only then too many. So the pace is looked at again after a tenth, a quarter and half of
the steps; the plan keeps every look, so that a resumed training follows the schedule it had.
"""

from collections.abc import Callable

_MIN_REHEARSALS = 3
_MAX_REHEARSALS = 20
_REHEARSAL_SHARE = 0.02  # of the time limit may go into measuring it

_LOOKS = (0.1, 0.25, 0.5)  # shares of the steps, as they are planned by then
_MIN_STEPS = 5  # that a look counts


class TimeLimit:
    """Counts what optimizer steps take, and says how many fit into the minutes given."""

    def __init__(self, minutes: float, *, agree: Callable[[float], float], done: int = 0) -> None:
        """Start with nothing measured.

        Args:
            minutes: for optimizer steps; probes and checkpoints come on top.
            agree: gives the first process's number to all.
            done: optimizer steps that earlier processes did; they are taken to have been as fast.
        """
        self._seconds = 60 * minutes
        self._agree = agree
        self._done = done
        self._spent = 0.0
        self._counted: list[float] = []
        self._is_cold = True

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
        self._is_cold = False
        return self._fit(sum(times) / len(times))

    def add_step(self, seconds: float) -> None:
        """Take in one optimizer step; a process's first one pays for warming up."""
        self._spent += seconds
        if self._is_cold:
            self._is_cold = False
        else:
            self._counted.append(seconds)

    def is_due(self, step: int, total: int, looks: int) -> bool:
        """Tell whether to look again, the same on every process.

        Args:
            step: optimizer steps done.
            total: that are planned.
            looks: how often the plan was looked at.
        """
        return (
            looks < len(_LOOKS)
            and _LOOKS[looks] * total <= step < total
            and len(self._counted) >= _MIN_STEPS
        )

    def look(self, step: int) -> int:
        """Compute the optimizer steps that fit in all, by the pace since the last look.

        Args:
            step: optimizer steps done.
        """
        pace = sum(self._counted) / len(self._counted)
        self._counted = []
        return step + self._fit(pace, self._done * pace)

    def _fit(self, pace: float, before: float = 0.0) -> int:
        left = self._seconds - self._spent - before
        return max(1, int(self._agree(left / pace)))
