import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch

from draftlab.targets import huge_pages
from draftlab.targets.huge_pages import ask_for_huge_pages
from draftlab.targets.packing import PackedLinear

MIB = 1 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def follows_advice():
    return THP.is_file() and "[never]" not in THP.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="advice to Linux")
def test_what_lies_in_memory_stays_what_it_was():
    memory = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    content = bytes(range(256)) * (8 * MIB // 256)
    memory[:] = content
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    huge = ask_for_huge_pages(address + 100, 6 * MIB)
    assert memory[:] == content
    assert huge <= 8 * MIB
    assert huge == 0 or follows_advice()


def test_memory_that_is_not_mapped_is_refused_quietly():
    assert ask_for_huge_pages(1 << 60, 4 * MIB) == 0


def test_small_pieces_are_not_worth_asking():
    assert ask_for_huge_pages(0, 1000) == 0


def test_a_system_without_advice_changes_nothing(monkeypatch):
    monkeypatch.setattr(huge_pages, "_find_madvise", lambda: None)
    assert ask_for_huge_pages(0, 4 * MIB) == 0
    weight = torch.randn(1024, 1024)
    x = torch.randn(3, 1024)
    torch.testing.assert_close(PackedLinear(weight, None)(x), x @ weight.T, rtol=1e-4, atol=1e-3)


def test_packed_weights_ask(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "draftlab.targets.packing.ask_for_huge_pages", lambda *piece: asked.append(piece)
    )
    weight = torch.randn(1024, 1024)
    layer = PackedLinear(weight, None)
    x = torch.randn(3, 1024)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-4, atol=1e-3)
    if layer.is_packed and hasattr(torch.ops.mkldnn, "data_ptr"):
        assert len(asked) == 1
        assert asked[0][1] >= weight.nbytes
