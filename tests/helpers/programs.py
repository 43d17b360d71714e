"""Users' scripts in processes of their own, with a time limit and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers.limits import HANG_S

ROOT = Path(__file__).parents[2]
_RANK_NAMES = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """This environment without any rank, with the repository importable, one thread a process."""
    kept = {name: value for name, value in os.environ.items() if name not in _RANK_NAMES}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process group that runs a command, and is ended with this context at the latest."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: Sequence[str], log: Path, timeout_s: float = HANG_S, **variables: str) -> None:
    """Run a command that must end well within its time."""
    with started(command, log, **variables) as process:
        finish(process, log, timeout_s)


def finish(process: subprocess.Popen[bytes], log: Path, timeout_s: float = HANG_S) -> None:
    """Wait for a process that must end well within its time."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running after {timeout_s} s\n{_tail(log)}") from None
    if code:
        raise AssertionError(f"exit code {code}\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]
