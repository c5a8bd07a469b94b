"""The kernel's own record of which memory is to come in large pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from patchgen.runtime.checkpoint import host_memory
from patchgen.runtime.checkpoint.host_memory import PAGE

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not SMAPS.exists(), reason="the kernel has no large pages, or does not tell"
)


def is_asked(address: int) -> bool:
    """Whether large pages were asked for at an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"{address:x} is in no mapping")


def test_only_full_pages_of_a_tensor():
    tensor = torch.empty(5 * PAGE)  # more than malloc ever takes from memory that was used before
    assert not is_asked(tensor.data_ptr() + 2 * PAGE)
    host_memory.prefer_large_pages(tensor[7:])
    first = -(-tensor.data_ptr() // PAGE) * PAGE
    assert is_asked(first) and is_asked(first + PAGE)
    if first > tensor.data_ptr():
        assert not is_asked(tensor.data_ptr())
    tensor.fill_(3)
    assert bool((tensor == 3).all())


def test_tensors_without_a_full_page():
    for tensor in (torch.ones(3), torch.ones(()), torch.empty(0), torch.empty(PAGE, device="meta")):
        host_memory.prefer_large_pages(tensor)
