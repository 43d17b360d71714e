"""The C allocator keeps what a step frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from lightning_zero.memory.host import keep_freed_memory

PROGRAM = """
import resource, sys
import torch
from lightning_zero.memory import host
if sys.argv[1] != "leave":
    assert host.keep_freed_memory()
if sys.argv[1] == "apart":
    with host.large_blocks_apart():
        pass
if sys.argv[1] == "give":
    assert host.give_freed_memory_back()
    with host.large_blocks_apart():
        pass

def step():
    held = [torch.ones(2**20) for _ in range(40)]  # 160 MiB, as the activations of a step
    held.clear()

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3)
"""


def page_faults(how):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_freed_memory_is_used_again_without_page_faults():
    assert page_faults("keep") < 2000 < page_faults("leave")
    assert page_faults("apart") < 2000 < page_faults("give")


def test_second_call_says_the_same():
    assert keep_freed_memory() == keep_freed_memory()
