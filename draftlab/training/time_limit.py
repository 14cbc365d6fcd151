"""How many optimizer steps a time limit allows: measured before the first, and looked at again.

A machine that happens to be busy when a training starts would give all of it too few steps, and one
that is idle only then too many. So the pace is looked at again whenever a fifth of the steps that
were left is done, or a fifth of the time that was left is gone. The plan keeps every look that
changed it.

A checkpoint keeps the time of the steps that lead to it, so that a resumed training goes on from
there: the pause does not count, nor do the steps that a kill took back.
"""

from collections.abc import Callable, Iterable

from scipy.stats import trim_mean

_MIN_REHEARSALS = 3
_MAX_REHEARSALS = 20
_REHEARSAL_SHARE = 0.02  # of the time limit may go into measuring it

_LOOK_SHARE = 0.2  # of the steps left, or of the time left, since the last look
_ASK_SHARE = 0.02  # of the steps left: how often the time is asked for, which all must agree on
_MIN_STEPS = 5  # that a look counts
_TRIMMED = 0.2  # of them at either end: a machine that slept tells nothing of the steps to come


class TimeLimit:
    """Counts what optimizer steps take, and says how many fit into the minutes given.

    Attributes:
        spent_s: seconds used up, by measuring and by optimizer steps.
        counted_s: of them, each optimizer step since the last look, seconds.
    """

    def __init__(
        self,
        minutes: float,
        *,
        agree: Callable[[float], float],
        spent_s: float = 0.0,
        counted_s: Iterable[float] = (),
    ) -> None:
        """Start with nothing measured, or from where a checkpoint left off.

        Args:
            minutes: for optimizer steps; probes and checkpoints come on top.
            agree: gives the first process's number to all.
            spent_s: what it held there.
            counted_s: what it held there.
        """
        self._seconds = 60 * minutes
        self._agree = agree
        self.spent_s = spent_s
        self.counted_s = list(counted_s)

    def measure(self, rehearse: Callable[[int], float]) -> int:
        """Measure how many optimizer steps fit, by doing some without effect.

        The first one pays for warming up and is not counted; the time all of them took is taken
        off.

        Args:
            rehearse: does step number n (1..) without changing anything; returns seconds.
        """
        self.spent_s = rehearse(1)
        times = [rehearse(1 + n) for n in range(1, _MIN_REHEARSALS + 1)]
        mean = self._agree(sum(times) / len(times))
        more = min(_MAX_REHEARSALS, int(_REHEARSAL_SHARE * self._seconds / mean)) - _MIN_REHEARSALS
        times += [rehearse(1 + _MIN_REHEARSALS + n) for n in range(1, more + 1)]
        self.spent_s += sum(times)
        return self._fit(sum(times) / len(times))

    def add_step(self, seconds: float) -> None:
        """Take in one optimizer step."""
        self.spent_s += seconds
        self.counted_s.append(seconds)

    def is_due(self, step: int, total: int) -> bool:
        """Tell whether to look again, the same on every process; all must ask together.

        Args:
            step: optimizer steps done.
            total: that are planned.
        """
        count, left = len(self.counted_s), total - step
        if left <= 0:
            return False
        if count >= max(_MIN_STEPS, _LOOK_SHARE * left):
            return True
        if count % max(1, int(_ASK_SHARE * (count + left))):
            return False
        return bool(self._agree(float(self._is_late())))

    def _is_late(self) -> bool:
        """Tell whether the steps since the last look took too much of the time left then."""
        left, gone = self._seconds - self.spent_s, sum(self.counted_s)
        return left <= 0 or (
            len(self.counted_s) >= _MIN_STEPS and gone > _LOOK_SHARE * (gone + left)
        )

    def look(self, step: int) -> int:
        """Compute the optimizer steps that fit in all, by the pace since the last look.

        Args:
            step: optimizer steps done.
        """
        pace = float(trim_mean(self.counted_s, _TRIMMED))
        self.counted_s = []
        return step + self._fit(pace)

    def _fit(self, pace: float) -> int:
        return max(1, int(self._agree((self._seconds - self.spent_s) / pace)))
