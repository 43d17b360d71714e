"""Hooks that torch calls for the whole process, and when they can be taken away.

[Note: hooks of what is collected]
An engine that nobody holds any more is collected at any time, even while torch runs through the
very hooks that are to go: a dictionary that shrinks then is an error in the middle of a user's
step. Whether torch does so is seen on the stacks. What cannot be removed at once, waits for the
next time that hooks come or go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FrameType

from lightning_zero._compat import RemovableHandle, innermost_frames


class GlobalHooks:
    """Hooks that go with their owner, or earlier; see [Note: hooks of what is collected].

    Args:
        owner: The hooks must hold no more than a weak reference to it.
        handles: Of the hooks.
    """

    def __init__(self, owner: object, handles: Iterable[RemovableHandle]) -> None:
        self._remove = weakref.finalize(owner, _remove, list(handles))
        _remove([])

    def remove(self) -> None:
        """Take them away; nothing calls the owner any more if it looks at none of the calls."""
        self._remove()


_waiting: list[RemovableHandle] = []


def _remove(handles: list[RemovableHandle]) -> None:
    _waiting.extend(handles)
    if not _are_hooks_run():
        while _waiting:
            _waiting.pop().remove()


_RUNNERS = {"torch.optim.optimizer", "torch.nn.modules.module"}
"""Modules of torch that run through hooks of the process."""


def _are_hooks_run() -> bool:
    """Whether any thread may be running through hooks."""
    return any(_is_runner(frame) for frame in innermost_frames())


def _is_runner(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in _RUNNERS:
            return True
        frame = frame.f_back
    return False
