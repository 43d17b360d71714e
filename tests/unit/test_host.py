"""The C allocator keeps what a step frees."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from lightning_zero.memory import host
from tests.helpers.spawn import run_ranks


def step():
    held = [torch.ones(2**20) for _ in range(40)]  # 160 MiB, as the activations of a step
    held.clear()


def page_faults_of_a_step(how):
    """In a process of its own, whose allocator nobody has told anything."""
    if how != "leave":
        assert host.keep_freed_memory()
    if how == "give":
        assert host.give_freed_memory_back()
    if how in ("apart", "give"):
        with host.large_blocks_apart():
            pass
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3


def page_faults(how):
    (count,) = run_ranks(page_faults_of_a_step, 1, how)
    return count


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_freed_memory_is_used_again_without_page_faults():
    assert page_faults("keep") < 2000 < page_faults("leave")
    assert page_faults("apart") < 2000 < page_faults("give")


def test_second_call_says_the_same():
    assert host.keep_freed_memory() == host.keep_freed_memory()
