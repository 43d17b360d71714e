"""Children that share this process's modules, and die as by a crash."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def forked(work: Callable[[], Any]) -> Iterator[Any]:
    """What ``work`` returns in a child, which then stays until it is killed with this context."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        _serve(work, target)
    os.close(target)
    try:
        with os.fdopen(source, "rb") as answer:
            is_fine, result = pickle.load(answer)
        if not is_fine:
            raise AssertionError(f"in the child: {result}")
        yield result
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(work: Callable[[], Any], target: int) -> None:
    """Never returns: nothing of the parent's may go on or be cleaned up here."""
    try:
        torch.set_num_threads(1)  # those of the parent are not here
        try:
            kept = True, work()  # as long as the child lives
        except BaseException:
            kept = False, traceback.format_exc()
        os.write(target, pickle.dumps(kept))
        time.sleep(100)
    finally:
        os._exit(1)
