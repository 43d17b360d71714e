"""A worker process: what it sees, how it fails, and that nothing of it stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_zero.worker import AccumulateJob, HostWorker, Job, WorkerDied
from lightning_zero.worker.binding import BoundThreads
from lightning_zero.worker.shared import SharedMemory

GONE_S = 20.0
"""How long a process may take to be gone; far more than it does."""


@dataclass(frozen=True)
class Pause(Job):
    """Takes its time."""

    duration_s: float

    def run(self, memory: SharedMemory) -> None:
        time.sleep(self.duration_s)


@pytest.fixture
def worker():
    made = HostWorker("tests")
    yield made
    made.close()


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_gone(pid: int) -> bool:
    end_s = time.monotonic() + GONE_S
    while is_there(pid) and time.monotonic() < end_s:
        time.sleep(0.01)
    return not is_there(pid)


def test_both_see_the_same_memory(worker):
    for dtype in (torch.float32, torch.bfloat16):
        total, grad = worker.zeros(7, torch.float32), worker.zeros(9, dtype)
        assert not total.any()
        grad.copy_(torch.arange(9))
        job = AccumulateJob(worker.share(total), worker.share(grad[2:]), 0.5, is_first=True)
        assert worker.submit(job).wait() >= 0.0
        assert total.tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
        grad.fill_(2.0)
        last = AccumulateJob(worker.share(total[3]), worker.share(grad[0]), 1.0, is_first=False)
        worker.submit(last).wait()
        assert total.tolist() == [1.0, 1.5, 2.0, 4.5, 3.0, 3.5, 4.0]


def test_jobs_are_done_in_their_order_and_waited_for_in_any(worker):
    total, one = worker.zeros(1, torch.float32), worker.zeros(1, torch.float32)
    one.fill_(1.0)
    names = worker.share(total), worker.share(one)
    jobs = [AccumulateJob(*names, factor, factor == 1.0) for factor in (1.0, 2.0, 3.0)]
    tickets = [worker.submit(Pause(0.2)), *(worker.submit(job) for job in jobs)]
    assert not tickets[0].is_done()
    tickets[-1].wait()
    assert tickets[0].is_done()
    assert total.item() == 6.0
    assert tickets[0].wait() >= 0.2


def test_a_job_that_fails_is_an_error_of_whoever_waits_for_it(worker):
    short, long = worker.zeros(2, torch.float32), worker.zeros(3, torch.float32)
    job = AccumulateJob(worker.share(short), worker.share(long), 1.0, is_first=True)
    ticket = worker.submit(job)
    with pytest.raises(RuntimeError, match=r"failed in its worker:[\s\S]*must match"):
        ticket.wait()
    worker.submit(Pause(0.0)).wait()  # it goes on


def test_memory_that_is_not_shared_has_no_name(worker):
    assert not worker.has(torch.zeros(3))
    with pytest.raises(ValueError, match=r"make it with HostWorker\.zeros"):
        worker.share(torch.zeros(3))


def test_a_worker_that_is_killed_is_an_error_and_leaves_memory_as_it_is():
    worker = HostWorker("tests")
    memory = worker.zeros(4, torch.float32).fill_(3.0)
    ticket = worker.submit(Pause(60.0))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=f"worker for tests .process {worker.pid}. was killed by"):
        ticket.wait()
    with pytest.raises(WorkerDied):
        worker.submit(Pause(0.0))
    assert memory.tolist() == [3.0] * 4
    worker.close()


def test_close_leaves_memory_but_no_process():
    gc.collect()  # files of earlier tests
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    worker = HostWorker("tests")
    memories = [worker.zeros(4, torch.float32) for _ in range(50)]
    memory = memories[-1].fill_(3.0)
    job = AccumulateJob(worker.share(memory), worker.share(memory), 1.0, is_first=False)
    worker.submit(job).wait()
    worker.close()
    worker.close()
    assert not is_there(worker.pid)
    assert memory.tolist() == [6.0] * 4
    assert (set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before
    with pytest.raises(WorkerDied, match="the worker for tests was closed"):
        worker.submit(Pause(0.0))


PARENT = """
import sys, time
from lightning_zero.worker import HostWorker
worker = HostWorker("tests")
worker.zeros(4, __import__("torch").float32)
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_worker_goes_with_its_rank(how):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as rank:
        assert rank.stdout is not None
        worker_pid = int(rank.stdout.readline())
        assert is_there(worker_pid)
        rank.send_signal(how)
        rank.wait(GONE_S)
        assert is_gone(worker_pid)


def test_threads_are_bound_until_they_are_released():
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    bound = BoundThreads([min(allowed)])
    assert os.sched_getaffinity(0) == {min(allowed)}
    assert torch.get_num_threads() == 1
    bound.release()
    bound.release()
    assert os.sched_getaffinity(0) == allowed
    assert torch.get_num_threads() == threads
