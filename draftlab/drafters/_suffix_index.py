"""A suffix automaton that counts: what followed every run of tokens seen so far, and how often.

In: tokens, one at a time. Out: the places where the newest tokens were read before, and what
followed them there. A state stands for runs of tokens that end at the same places (Blumer et al.,
Theoretical Computer Science 40, 1985), so a text of n tokens takes at most 2n states and adding a
token a constant number of steps on average; counts are kept for runs up to a bound, at most that
many steps more.

Read `SuffixIndex.append`, then `SuffixIndex.matches`.
"""

from collections.abc import Iterator, Sequence

ROOT = 0


class SuffixIndex:
    """Counts of all runs of at most `depth` tokens in one text or several.

    A state is an integer; `ROOT` stands for the empty run.
    """

    def __init__(self, depth: int) -> None:
        """Start without a text.

        Args:
            depth: longest run whose count is right, tokens.
        """
        self._depth = depth
        self._next: list[dict[int, int]] = [{}]
        self._shorter = [-1]  # suffix links
        self._longest = [0]  # length of a state's longest run
        self._count = [0]  # times a state's runs were seen
        self._followed = [0]  # times they were seen with a token after them
        self._best = [-1]  # the likeliest such token, the latest of equals
        self._whole = ROOT  # state of the text so far
        self._newest = ROOT  # state of its last `matched` tokens
        self._matched = 0

    @property
    def num_states(self) -> int:
        """States in memory; at most twice the tokens."""
        return len(self._next)

    def start(self) -> None:
        """Begin another text; no run reaches across."""
        self._whole = self._newest = ROOT
        self._matched = 0

    def append(self, token: int) -> None:
        """Add the text's next token."""
        self._extend(token)
        next_, count, followed, best = self._next, self._count, self._followed, self._best
        # every suffix that was there before has now been followed by this token once more
        state, seen = self._newest, -1
        while state != -1:
            child = next_[state][token]
            if child != seen:  # neighbours on this walk may share the run that they make together
                count[child] += 1
                seen = child
            followed[state] += 1
            likeliest = best[state]
            if likeliest == -1 or count[child] >= count[next_[state][likeliest]]:
                best[state] = token
            state = self._shorter[state]
        self._newest = next_[self._newest][token]
        self._matched += 1
        if self._matched == self._depth:
            self._matched -= 1
            if self._longest[self._shorter[self._newest]] == self._matched:
                self._newest = self._shorter[self._newest]

    def matches(self, most: int) -> Iterator[tuple[int, int]]:
        """Give states of the text's last tokens that were read before, the longest run first.

        Args:
            most: longest run to look for, tokens; below `depth`.

        Yields:
            A state that something followed, and the tokens that match, 1..most.
        """
        state = self._newest
        while state != ROOT and self._longest[self._shorter[state]] >= most:
            state = self._shorter[state]
        return self._shrinking(state, min(self._matched, most))

    def find(self, tail: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Give states of the last tokens of another text, as `matches`, no longer than these."""
        state, matched = ROOT, 0
        for token in tail:
            while state != ROOT and token not in self._next[state]:
                state = self._shorter[state]
                matched = self._longest[state]
            following = self._next[state].get(token)
            if following is not None:
                state, matched = following, matched + 1
        return self._shrinking(state, matched)

    def likeliest(self, state: int) -> tuple[int, int, float] | None:
        """Give what followed a state most often.

        Returns:
            The token, the state it leads to, and its share of all that followed; None when nothing
            followed.
        """
        followed = self._followed[state]
        if not followed:
            return None
        token = self._best[state]
        following = self._next[state][token]
        return token, following, self._count[following] / followed

    def ranked(self, state: int, most: int) -> list[tuple[int, int, float]]:
        """Give what followed a state, most often first; `likeliest` heads the list."""
        followed = self._followed[state]
        if not followed:
            return []
        count, best = self._count, self._best[state]
        order = sorted(
            self._next[state].items(),
            key=lambda item: (-count[item[1]], item[0] != best, item[0]),
        )
        return [(token, child, count[child] / followed) for token, child in order[:most]]

    def _shrinking(self, state: int, matched: int) -> Iterator[tuple[int, int]]:
        while state != ROOT:
            if self._followed[state]:
                yield state, matched
            state = self._shorter[state]
            matched = self._longest[state]

    def _extend(self, token: int) -> None:
        """Let the automaton know the text with one token more."""
        before = self._whole
        known = self._next[before].get(token)
        if known is not None:  # only where a text begins as an earlier one did
            self._whole = self._part(before, token, known)
            return
        new = self._add({}, -1, self._longest[before] + 1)
        while before != -1 and token not in self._next[before]:
            self._next[before][token] = new
            before = self._shorter[before]
        if before == -1:
            self._shorter[new] = ROOT
        else:
            self._shorter[new] = self._part(before, token, self._next[before][token])
        self._whole = new

    def _part(self, before: int, token: int, old: int) -> int:
        """Give the state of exactly `before`'s runs and the token, parted from longer ones."""
        length = self._longest[before] + 1
        if self._longest[old] == length:
            return old
        part = self._add(dict(self._next[old]), self._shorter[old], length)
        self._count[part] = self._count[old]
        self._followed[part] = self._followed[old]
        self._best[part] = self._best[old]
        self._shorter[old] = part
        state: int = before
        while state != -1 and self._next[state].get(token) == old:
            self._next[state][token] = part
            state = self._shorter[state]
        if self._newest == old and self._matched <= length:
            self._newest = part
        return part

    def _add(self, following: dict[int, int], shorter: int, longest: int) -> int:
        self._next.append(following)
        self._shorter.append(shorter)
        self._longest.append(longest)
        self._count.append(0)
        self._followed.append(0)
        self._best.append(-1)
        return len(self._next) - 1
