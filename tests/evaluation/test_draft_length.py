import pytest

from draftlab.evaluation.draft_length import choose_draft_length
from tests.evaluation.scripted import generation, step


class DecoderAt:
    """Accepts up to `right` tokens; a step costs `base` plus `each` a draft token."""

    def __init__(self, right, base, each, deepest=99):
        self.right, self.base, self.each, self.deepest = right, base, each, deepest

    def __call__(self, k):
        self.k = min(k, self.deepest)
        return _Decoder(self.k, min(self.right, self.k), self.base + self.each * self.k)


class _Decoder:
    def __init__(self, k, accepted, verify_s):
        self.steps = [step(k, accepted, verify_s=verify_s)] * 6

    def generate(self, prompts, *, max_new_tokens=None, batch_size=None, row_keys=None):
        return [generation(self.steps, index=i) for i in range(len(prompts))]


def choose(decoder_at, candidates=(1, 2, 3, 4, 6, 8)):
    return choose_draft_length(decoder_at, [(1,)] * 4, candidates, max_new_tokens=32, batch_size=4)


def test_the_k_with_most_tokens_a_second_is_chosen():
    choice = choose(DecoderAt(right=3, base=0.010, each=0.002))
    assert choice.num_draft_tokens == 3
    by_k = {o.num_draft_tokens: o for o in choice.options}
    assert by_k[2].tau == pytest.approx(3.0)
    assert by_k[8].tau == pytest.approx(4.0)
    assert by_k[8].step_s == pytest.approx(0.026)


def test_expensive_drafts_make_the_shortest_k_best():
    assert choose(DecoderAt(right=1, base=0.010, each=0.008)).num_draft_tokens == 1


def test_among_equals_the_smallest_k_wins():
    assert choose(DecoderAt(right=2, base=0.010, each=0.0)).num_draft_tokens == 2


def test_one_slow_moment_does_not_change_the_choice():
    quiet, hiccups = DecoderAt(right=3, base=0.010, each=0.002), iter([0.0] * 14 + [9.0] * 2)

    class Disturbed(_Decoder):
        def generate(self, prompts, *, max_new_tokens=None, batch_size=None, row_keys=None):
            made = super().generate(prompts)
            if len(prompts) > 1 or not (late := next(hiccups, 0.0)):
                return made
            slow = [step(s.num_drafted, s.num_accepted, verify_s=late) for s in self.steps]
            return [generation(slow)]

    def decoder_at(k):
        return Disturbed(k, min(3, k), 0.010 + 0.002 * k)

    assert choose(decoder_at).num_draft_tokens == choose(quiet).num_draft_tokens == 3


def test_only_steps_count_in_what_a_step_costs():
    class Slow(_Decoder):
        def generate(self, prompts, *, max_new_tokens=None, batch_size=None, row_keys=None):
            # the longer the drafts, the fewer steps share what lies between them
            spent = 1.0 + sum(s.verify_s for s in self.steps)
            return [generation(self.steps[: 7 - self.k], decode_s=spent) for _ in prompts]

    class SlowAt(DecoderAt):
        def __call__(self, k):
            made = Slow(k, min(self.right, k), self.base + self.each * k)
            made.k = k
            return made

    choice = choose(SlowAt(right=3, base=0.010, each=0.002), candidates=(1, 2, 3, 4, 6))
    assert choice.num_draft_tokens == 3
    assert [o.step_s for o in choice.options] == pytest.approx([0.012, 0.014, 0.016, 0.018, 0.022])


def test_k_beyond_what_the_drafter_can_draft_is_not_tried():
    choice = choose(DecoderAt(right=9, base=0.010, each=0.0, deepest=3))
    assert [o.num_draft_tokens for o in choice.options] == [1, 2, 3]


def test_drafts_cut_at_an_answers_end_make_no_k_look_cheaper():
    class Cut(_Decoder):
        """Drafts as many tokens as its answer has room for before the next one; all are wrong."""

        def generate(self, prompts, *, max_new_tokens=None, batch_size=None, row_keys=None):
            rooms = range(max_new_tokens - 1, 0, -1)  # the first token comes with the prompt
            drafted = [min(self.k, room - 1) for room in rooms]
            steps = [step(k, 0, verify_s=0.010 + 0.002 * k) for k in drafted]
            return [generation(steps) for _ in prompts]

    class CutAt(DecoderAt):
        def __call__(self, k):
            made = Cut(k, 0, 0.0)
            made.k = k
            return made

    choice = choose(CutAt(right=0, base=0.010, each=0.002))
    assert choice.num_draft_tokens == 1
    expected = [0.010 + 0.002 * o.num_draft_tokens for o in choice.options]
    assert [o.step_s for o in choice.options] == pytest.approx(expected)
