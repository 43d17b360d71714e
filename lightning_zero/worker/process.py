"""The worker's side: takes jobs one after the other."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from lightning_zero.worker.messages import Do, Done, NewArena, Ready
from lightning_zero.worker.shared import Arena, SharedMemory

SET_DEATH_SIGNAL = 1
"""Of ``prctl``."""


def main(arguments: Sequence[str]) -> None:
    """Run until the rank closes its end, or is gone.

    Args:
        arguments: Descriptors of the two sockets, process id of the rank, and the cores to run on.
    """
    messages, descriptors, rank_pid, *cores = map(int, arguments)
    _end_with(rank_pid)
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
    connection = Connection(messages)
    incoming: queue.SimpleQueue[NewArena | Do] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, incoming), daemon=True).start()
    memory = SharedMemory()
    connection.send(Ready(tuple(sorted(os.sched_getaffinity(0)))))
    with socket.socket(fileno=descriptors) as files:
        while True:
            message = incoming.get()
            if isinstance(message, NewArena):
                _map(message, files, memory)
            else:
                connection.send(_done(message, memory))


def _end_with(rank_pid: int) -> None:
    """A rank that is killed takes its worker with it, whoever still holds its sockets."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != rank_pid:
        _end_now()


def _end_now() -> None:
    """In the middle of a job, if need be: nobody waits for it."""
    os.kill(os.getpid(), signal.SIGKILL)


def _receive(connection: Connection, incoming: queue.SimpleQueue[NewArena | Do]) -> None:
    """In a thread of its own, so that a rank never waits for a job to say what comes after it."""
    try:
        while True:
            incoming.put(connection.recv())
    except (EOFError, OSError):
        _end_now()


def _map(message: NewArena, files: socket.socket, memory: SharedMemory) -> None:
    _, (descriptor,), _, _ = socket.recv_fds(files, 1, 1)
    memory.add(message.number, Arena(descriptor, message.nbytes))
    os.close(descriptor)


def _done(message: Do, memory: SharedMemory) -> Done:
    begin_s = time.perf_counter()
    error = ""
    try:
        message.job.run(memory)
    except Exception:
        error = traceback.format_exc()
    return Done(message.number, time.perf_counter() - begin_s, error)
