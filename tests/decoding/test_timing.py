"""Case O-32: a reading that does not wait times the queueing of work, not the work."""

import torch

from draftlab.decoding.timing import DeviceClock


def test_a_reading_waits_for_the_device_first():
    calls = []

    def now():
        calls.append("now")
        return 1.5

    clock = DeviceClock(
        torch.device("cpu"), now=now, synchronise=lambda: calls.append("synchronise")
    )
    assert clock.read() == 1.5
    assert calls == ["synchronise", "now"]


def test_work_still_queued_at_a_reading_counts_before_it():
    seconds = 0.0
    queued = [0.0]

    def finish():
        nonlocal seconds
        seconds += queued.pop()
        queued.append(0.0)

    clock = DeviceClock(torch.device("cpu"), now=lambda: seconds, synchronise=finish)
    began = clock.read()
    queued[0] = 3.0
    assert clock.read() - began == 3.0
    assert clock.read() - began == 3.0


def test_the_processor_is_not_waited_for():
    readings = iter([1.0, 2.0])
    clock = DeviceClock(torch.device("cpu"), now=lambda: next(readings))
    assert [clock.read(), clock.read()] == [1.0, 2.0]


def test_time_passes():
    clock = DeviceClock(torch.device("cpu"))
    first = clock.read()
    assert clock.read() >= first


def test_a_cuda_device_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = torch.device("cuda", 1)
    DeviceClock(device, now=lambda: 0.0).read()
    assert waited == [device]
