"""Generations written by hand, and decoders that obey a fake clock."""

from draftlab.decoding.records import Generation, StepRecord


def step(drafted, accepted, emitted=None, *, overlaps=(), draft_s=0.0, verify_s=0.01, commit_s=0.0):
    emitted = accepted + 1 if emitted is None else emitted
    return StepRecord(drafted, accepted, emitted, tuple(overlaps), draft_s, verify_s, commit_s, 1)


def generation(steps, *, index=0, ids=None, first_token_s=0.05, decode_s=None):
    """One answer: a token from prefill, then what the steps emitted."""
    count = 1 + sum(s.num_emitted for s in steps)
    ids = tuple(range(1000, 1000 + count)) if ids is None else tuple(ids)
    assert len(ids) == count
    spent = sum((s.draft_s + s.verify_s + s.commit_s for s in steps), 0.0)
    return Generation(
        index,
        (1, 2),
        ids,
        "length",
        tuple(steps),
        first_token_s,
        spent if decode_s is None else decode_s,
    )


class FakeClock:
    """Time moves only when told to; every reading is noted."""

    def __init__(self, events=None):
        self.now = 0.0
        self.events = [] if events is None else events

    def read(self):
        self.events.append("read")
        return self.now


class ScriptedDecoder:
    """Answers with `tokens` tokens; each step takes its time on the clock."""

    def __init__(self, clock, *, tokens, per_step, draft_s=0.0, verify_s=0.01, name="arm"):
        self.clock, self.tokens, self.per_step, self.name = clock, tokens, per_step, name
        self.draft_s, self.verify_s = draft_s, verify_s
        self.prompts = []

    def generate(self, prompts, *, max_new_tokens=None, batch_size=None, row_keys=None):
        self.clock.events.append(self.name)
        assert batch_size == 1
        self.prompts.append(tuple(prompts[0]))
        self.clock.now += 0.05
        steps, left = [], self.tokens - 1
        while left:
            emitted = min(self.per_step, left)
            steps.append(
                step(
                    self.per_step - 1,
                    self.per_step - 1,
                    emitted,
                    draft_s=self.draft_s,
                    verify_s=self.verify_s,
                )
            )
            self.clock.now += self.draft_s + self.verify_s
            left -= emitted
        return [generation(steps)]
