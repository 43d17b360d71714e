"""The rank's side of a worker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from lightning_zero.worker.jobs import Job
from lightning_zero.worker.messages import Do, Done, NewArena
from lightning_zero.worker.shared import Arena, Shared, SharedMemory, new_file

# The package alone, without what it imports for its users: Lightning takes seconds.
PROGRAM = """
import sys, types
package = types.ModuleType("lightning_zero")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_zero"] = package
from lightning_zero.worker.process import main
main(sys.argv[2:])
"""
STOP_TIMEOUT_S = 10.0
"""How long a worker that is closed may go on with its last job."""
SHOWN_NBYTES = 2000
"""End of what a worker has printed that its error shows."""


class WorkerDied(RuntimeError):
    """The worker of a rank is gone, and with it what it was doing."""


class Ticket:
    """Stands for a job."""

    def __init__(self, worker: HostWorker, number: int) -> None:
        self._worker = worker
        self._number = number

    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._worker.has_ended(self._number)

    def wait(self) -> float:
        """Wait until it has ended.

        Returns:
            How long it took, in seconds.

        Raises:
            WorkerDied: The worker is gone.
            RuntimeError: The job has failed.
        """
        done = self._worker.wait_for(self._number)
        if done.error:
            raise RuntimeError(f"a step on the host has failed in its worker:\n{done.error}")
        return done.duration_s


class HostWorker:
    """A worker, see [Note: a worker] in ``worker/__init__.py``.

    Args:
        name: What it is for, to be named in errors.
        cores: Cores that it runs on; empty for those of the rank.
        pin_memory: Page-lock the memory, for copies from and to an accelerator.
    """

    def __init__(self, name: str, cores: Sequence[int] = (), pin_memory: bool = False) -> None:
        self._name = name
        self._pin_memory = pin_memory
        self._memory = SharedMemory()
        self._pinned: list[int] = []
        self._arenas = self._jobs = 0
        self._ended: dict[int, Done] = {}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        messages, their_messages = socket.socketpair()
        self._files, their_files = socket.socketpair()
        with their_messages, their_files:
            self._process = _start(their_messages, their_files, cores, self._output)
        self._connection = Connection(messages.detach())
        self._is_open = True
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D memory that the worker sees, too; it goes with its last tensor."""
        nbytes = max(1, numel * dtype.itemsize)
        nbytes += -nbytes % 8
        descriptor = new_file(nbytes)
        try:
            arena = Arena(descriptor, nbytes)
            self._memory.add(self._arenas, arena)
            self._send(NewArena(self._arenas, nbytes))
            socket.send_fds(self._files, [b"f"], [descriptor])
        finally:
            os.close(descriptor)
        self._arenas += 1
        if self._pin_memory:
            _pin(arena.bytes)
            self._pinned.append(arena.begin)
        return arena.bytes[: numel * dtype.itemsize].view(dtype)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory from :meth:`zeros`."""
        return self._memory.has(tensor)

    def share(self, tensor: Tensor) -> Shared:
        """Name a tensor for a job.

        Raises:
            ValueError: It is no view of memory from :meth:`zeros`.
        """
        return self._memory.shared(tensor)

    def submit(self, job: Job) -> Ticket:
        """Have a job done, after those that were submitted before; does not wait for it.

        Raises:
            WorkerDied: The worker is gone.
        """
        number, self._jobs = self._jobs, self._jobs + 1
        self._send(Do(number, job))
        return Ticket(self, number)

    def has_ended(self, number: int) -> bool:
        """Whether a job has ended."""
        while number not in self._ended and self._connection.poll():
            self._receive()
        return number in self._ended

    def wait_for(self, number: int) -> Done:
        """Wait for the end of a job, which is told once."""
        while number not in self._ended:
            self._receive()
        return self._ended.pop(number)

    def close(self) -> None:
        """End the worker. Tensors stay valid in this process."""
        if not self._is_open:
            return
        self._is_open = False
        self._finalizer()
        self._files.close()
        self._output.close()
        for address in self._pinned:
            _unpin(address)
        self._memory.clear()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(message, Done):
            self._ended[message.number] = message

    def _died(self) -> WorkerDied:
        if not self._is_open:
            return WorkerDied(f"the worker for {self._name} was closed")
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        self._output.seek(0)
        printed = self._output.read()[-SHOWN_NBYTES:].decode(errors="replace").strip()
        how = (
            f"ended with status {status}"
            if status is None or status >= 0
            else (f"was killed by signal {-status}")
        )
        return WorkerDied(
            f"the worker for {self._name} (process {self.pid}) {how}. Weights are those of the last"
            f" step that was finished. Look for what has ended it (memory: the system's log); it"
            f" printed: {printed or 'nothing'}"
        )


def _start(
    messages: socket.socket, files: socket.socket, cores: Sequence[int], output: Any
) -> subprocess.Popen[bytes]:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    descriptors = messages.fileno(), files.fileno()
    arguments = [package, *map(str, (*descriptors, os.getpid(), *cores))]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for the rank, which ends its worker in its own time
    )


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pin(memory: Tensor) -> None:
    """Page-lock memory for an accelerator."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    torch.cuda.check_error(int(status))


def _unpin(address: int) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)
