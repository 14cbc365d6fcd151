"""The decoder's own time: what is left of a round without target and drafter."""

import pytest
from scripted import FakeClock, Scripted, decode_settings

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.host_share import measure_host_share


class TickingClock(FakeClock):
    """Passes a little at every reading, as host code does."""

    def read(self):
        self.seconds += 0.001
        return self.seconds


def test_host_time_is_what_target_and_drafter_leave(target, prompts, monkeypatch):
    clock, run = TickingClock(), target.run

    def slow(*args, **rest):
        clock.pass_time(1.0)
        return run(*args, **rest)

    monkeypatch.setattr(target, "run", slow)
    drafter = Scripted(lambda prefix, depth: [1] * depth)
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *a: clock.pass_time(0.25) or propose(*a))
    decoder = Decoder(target, drafter, decode_settings(), clock=clock)
    found = measure_host_share(decoder, prompts[:2], max_new_tokens=6)
    assert found.num_rounds > 4
    # a limit leaves the last round no room for drafts
    assert found.target_s == pytest.approx(found.num_rounds, abs=0.1)
    assert found.drafter_s == pytest.approx(0.25 * (found.num_rounds - 2), abs=0.1)
    assert 0 < found.share < 0.05
    assert (decoder.target, decoder.drafter) == (target, drafter)


def test_a_decoder_without_a_drafter_has_a_host_share_too(target, prompts):
    decoder = Decoder(target, None, decode_settings(), clock=TickingClock())
    found = measure_host_share(decoder, prompts[:1], max_new_tokens=4)
    assert found.num_rounds == 3
    assert found.drafter_s == 0
