"""Every rule once more, in fractions: plain recursions from their papers, nothing of draftlab.

A model is a function from a prefix (a tuple of ids) to a law (a tuple of fractions). A round is a
function from a prefix to the law of what one round puts out, {tokens: probability}.
"""

from collections import defaultdict
from fractions import Fraction
from functools import cache
from random import Random

V = 3
ONE = Fraction(1)


def toy_model(seed, zeros=False):
    """Make a model with fixed random laws; with zeros, some tokens are impossible."""

    @cache
    def law(prefix):
        random = Random(f"{seed}{prefix}")
        weights = [random.randint(0 if zeros else 1, 4) for _ in range(V)]
        weights[random.randrange(V)] += 1
        return tuple(Fraction(w, sum(weights)) for w in weights)

    return law


def normalised(weights):
    total = sum(weights)
    return tuple(w / total for w in weights) if total else None


def residual(p, q, scale=ONE):
    """Give (scale * p - q)+ normalised, or None where nothing is left."""
    return normalised([max(scale * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)])


def without(q, token):
    return normalised([Fraction(0) if x == token else b for x, b in enumerate(q)])


def ratio(a, b):
    return min(ONE, a / b) if b else ONE


def add(law, tokens, mass):
    if mass:
        law[tokens] += mass


def finish(law, tokens, last, mass):
    """Put the last token of a round, drawn from `last`, behind the accepted ones."""
    if mass:
        for x in range(V):
            add(law, (*tokens, x), mass * last[x])


# ------------------------------------------------------------------ one round of each rule


def two_tokens(prefix, drafted):
    """Draft two tokens, whatever they are."""
    return len(drafted) < 2


def all_of_them(draft, x):
    return True


def speculative(p, q, more=two_tokens, after_rejection=residual, keeps=all_of_them):
    """Token-level speculative sampling.

    more: whether to draft another token after these. keeps: whether a drawn token is verified,
    told its law; anything that reads the token's value is broken.
    """

    def round_law(prefix):
        law = defaultdict(Fraction)

        def go(accepted, mass):
            target = p(prefix + accepted)
            if not more(prefix, accepted):
                return finish(law, accepted, target, mass)
            draft, rejected = q(prefix + accepted), Fraction(0)
            for x in range(V):
                if not keeps(draft, x):
                    finish(law, accepted, target, mass * draft[x])
                    continue
                kept = draft[x] * ratio(target[x], draft[x])
                rejected += draft[x] - kept
                if mass * kept:
                    go((*accepted, x), mass * kept)
            if rejected:
                finish(law, accepted, after_rejection(target, draft), mass * rejected)

        go((), ONE)
        return law

    return round_law


def argmax_judged_as_drawn(p, q, depth):
    """Broken: the draft is argmax q, and is judged as if it had been drawn from q."""

    def round_law(prefix):
        law = defaultdict(Fraction)

        def go(accepted, mass):
            target = p(prefix + accepted)
            if len(accepted) == depth:
                return finish(law, accepted, target, mass)
            draft = q(prefix + accepted)
            x = max(range(V), key=draft.__getitem__)
            kept = ratio(target[x], draft[x])
            if kept:
                go((*accepted, x), mass * kept)
            if kept < 1:
                finish(law, accepted, residual(target, draft), mass * (1 - kept))

        go((), ONE)
        return law

    return round_law


def sampled_verify(p, q, depth, fresh=False):
    """The target draws at each place; fresh: broken, draws anew where the draft differs."""

    def round_law(prefix):
        law = defaultdict(Fraction)

        def go(accepted, mass):
            target = p(prefix + accepted)
            if len(accepted) == depth:
                return finish(law, accepted, target, mass)
            draft = q(prefix + accepted)
            for x in range(V):
                if draft[x] * target[x]:
                    go((*accepted, x), mass * draft[x] * target[x])
                for y in range(V):
                    if x != y:
                        differs = mass * draft[x] * target[y]
                        if fresh:
                            finish(law, accepted, target, differs)
                        else:
                            add(law, (*accepted, y), differs)

        go((), ONE)
        return law

    return round_law


def block(p, q, more=two_tokens, first_failure=False, scaled=True, keeps=all_of_them):
    """Block verification; `more` and `keeps` as above."""

    def round_law(prefix):
        law = defaultdict(Fraction)

        def draft(tokens, mass):
            if not more(prefix, tokens):
                return judge(tokens, mass)
            own = q(prefix + tokens)
            for x, chance in enumerate(own):
                if chance and keeps(own, x):
                    draft((*tokens, x), mass * chance)
                elif chance:
                    judge(tokens, mass * chance)
            return None

        def judge(tokens, mass):
            length = len(tokens)
            w = [ONE]
            for i, x in enumerate(tokens):
                before = prefix + tokens[:i]
                w.append(min(ONE, w[-1] * p(before)[x] / q(before)[x]))
            passing = [ONE]
            for i in range(1, length + 1):
                if i == length:
                    passing.append(w[i])
                    continue
                at = prefix + tokens[:i]
                left = sum(
                    max(w[i] * a - b, Fraction(0)) for a, b in zip(p(at), q(at), strict=True)
                )
                passing.append(left / (left + 1 - w[i]) if left + 1 - w[i] else ONE)
            for n, chance in enumerate(stops(passing)):
                if not mass * chance:
                    continue
                at = prefix + tokens[:n]
                last = p(at)
                if n < length:
                    last = residual(last, q(at), w[n] if scaled else ONE)
                finish(law, tokens[:n], last, mass * chance)

        def stops(passing):
            """Give the chance of each accepted length."""
            if first_failure:
                runs = [ONE]
                for chance in passing[1:]:
                    runs.append(runs[-1] * chance)
                return [a - b for a, b in zip(runs, [*runs[1:], Fraction(0)], strict=True)]
            chances, none_later = [], ONE
            for chance in reversed(passing):
                chances.append(none_later * chance)
                none_later *= 1 - chance
            return chances[::-1]

        draft((), ONE)
        return law

    return round_law


def point_tree(p, q, depth, width, judged_as_drawn=False):
    """Children are the `width` likeliest of q; broken when judged as if drawn from q."""

    def round_law(prefix):
        law = defaultdict(Fraction)

        def go(accepted, mass):
            target, draft = p(prefix + accepted), q(prefix + accepted)
            if len(accepted) == depth:
                return finish(law, accepted, target, mass)
            for x in sorted(range(V), key=lambda x: -draft[x])[:width]:
                own = draft if judged_as_drawn else tuple(Fraction(x == y) for y in range(V))
                kept = ratio(target[x], own[x])
                if mass * kept:
                    go((*accepted, x), mass * kept)
                mass *= 1 - kept
                if not mass:
                    return None
                target = residual(target, own)
            return finish(law, accepted, target, mass)

        go((), ONE)
        return law

    return round_law


def drawn_tree(p, q, depth, width, forgets=False, keep=lambda q, siblings: siblings):
    """Children are drawn from q without replacement.

    forgets: broken, the law of a later sibling is taken to be q itself. keep: which of the drawn
    siblings are verified; anything that reads their values is broken.
    """

    def round_law(prefix):
        law = defaultdict(Fraction)

        def draws(draft, taken, mass):
            if len(taken) == width or draft is None:
                yield taken, mass
                return
            for x, chance in enumerate(draft):
                if chance:
                    yield from draws(without(draft, x), (*taken, x), mass * chance)

        def go(accepted, mass):
            target, draft = p(prefix + accepted), q(prefix + accepted)
            if len(accepted) == depth:
                return finish(law, accepted, target, mass)
            for siblings, chance in draws(draft, (), mass):
                judge(accepted, target, draft, keep(draft, siblings), chance)

        def judge(accepted, target, draft, siblings, mass):
            for x in siblings:
                kept = ratio(target[x], draft[x])
                if mass * kept:
                    go((*accepted, x), mass * kept)
                mass *= 1 - kept
                if not mass:
                    return
                target = residual(target, draft)
                draft = draft if forgets else without(draft, x)
            finish(law, accepted, target, mass)

        go((), ONE)
        return law

    return round_law


# ------------------------------------------------------------------ whole sequences


def sequences(round_law, length):
    """Give the joint law of the first `length` tokens that rounds put out."""
    done = defaultdict(Fraction)
    waiting = {(): ONE}
    while waiting:
        later = defaultdict(Fraction)
        for prefix, mass in waiting.items():
            for tokens, chance in round_law(prefix).items():
                whole = prefix + tokens
                if len(whole) >= length:
                    done[whole[:length]] += mass * chance
                else:
                    later[whole] += mass * chance
        waiting = later
    return done


def autoregressive(p, length):
    """Give the joint law of `length` tokens drawn one by one."""
    law = {(): ONE}
    for _ in range(length):
        law = {(*s, x): m * a for s, m in law.items() for x, a in enumerate(p(s)) if m * a}
    return law


def total_variation(a, b):
    return sum(abs(a.get(s, Fraction(0)) - b.get(s, Fraction(0))) for s in {*a, *b}) / 2
