"""Plain decoding while drafting does not pay, told from what past rounds cost and gave.

In: seconds and tokens of every round. Out: whether the next one drafts. Reading past rounds alone
keeps the law: a round's draws are independent of all earlier ones, so its tokens follow the target
whichever way it is decoded. (What the choice may never see is this round's own draws.)

Texts under `speculative` then depend on the clock, though their law does not; `sampled_verify` and
greedy texts do not either.
"""

import statistics
from collections import deque
from collections.abc import Iterable

_WINDOW = 16
_FEWEST = 4  # drafted rounds before the first judgement
_RETRY = 2  # drafted rounds of a retry
_FEWEST_PLAIN = 3  # plain rounds a judgement rests on: a single one may have been the warm-up
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 1024


class Fallback:
    """Pauses drafting when a drafted round gives fewer tokens than its time would give plainly."""

    def __init__(self) -> None:
        """Begin by drafting."""
        self._plain_s: dict[int, deque[float]] = {}
        self._drafted_s: dict[int, deque[float]] = {}
        self._tokens: deque[float] = deque(maxlen=_WINDOW)
        self._judged_after = _FEWEST
        self._pause = _FIRST_PAUSE
        self._plain_rounds_left = 0

    @property
    def wants_draft(self) -> bool:
        """True when the next round should draft."""
        return self._plain_rounds_left == 0

    def note_plain(self, *, seconds: float, live: int) -> None:
        """Take in a round of `live` rows in which the drafter was not asked."""
        self._plain_s.setdefault(live, deque(maxlen=_WINDOW)).append(seconds)
        self._plain_rounds_left = max(0, self._plain_rounds_left - 1)

    def note_drafted(self, *, seconds: float, live: int, tokens: float) -> None:
        """Take in a round of the drafter, and judge drafting when enough of them are known.

        Args:
            seconds: of the round.
            live: rows in it.
            tokens: accepted and next tokens a row, on average; 1 where it proposed nothing.
        """
        self._drafted_s.setdefault(live, deque(maxlen=_WINDOW)).append(seconds)
        self._tokens.append(tokens)
        if len(self._tokens) < self._judged_after:
            return
        # of this many rows alone: what a plain round of others costs says little
        known = self._plain_s.get(live, ())
        if len(known) < _FEWEST_PLAIN:
            self._plain_rounds_left = _FEWEST_PLAIN - len(known)
            return
        plain_s = statistics.median(known)
        drafted_s = _mean_without_extremes(self._drafted_s[live])
        if statistics.fmean(self._tokens) * plain_s >= drafted_s:
            self._pause = _FIRST_PAUSE
            self._judged_after = _FEWEST
            return
        self._plain_rounds_left = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._tokens.clear()
        self._judged_after = _RETRY


def _mean_without_extremes(seconds: Iterable[float]) -> float:
    """Give the mean without the shortest and the longest, which a disturbance may have been.

    Not the median: rounds with an empty draft cost less than others, and both count.
    """
    ordered = sorted(seconds)
    return statistics.fmean(ordered[1:-1] or ordered)
