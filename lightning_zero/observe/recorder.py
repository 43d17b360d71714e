"""The interface through which the rooms tell what they do; silent unless somebody listens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Span = Any
"""What ``begin`` returns and ``end`` takes; opaque to the one that calls them."""


class Recorder:
    """Takes notice of nothing. The base of those who do.

    Kinds of spans: the eight timers of stage 3 (``forward_fetch_submit``, ``forward_fetch_wait``,
    ``forward_prefetch_submit``, ``forward_all_gather`` and the same for backward), ``forward`` and
    ``backward`` as a whole, ``use`` (a unit runs its forward), ``reduce`` (a bucket of gradients is
    on its way) and ``reduce_wait`` (backward waits for one). Kinds of instants: ``release``.
    """

    is_silent = True
    """Whether a caller can save itself the trouble."""

    def begin(self, kind: str, bucket: int = -1, numel: int = 0) -> Span:
        """A span begins.

        Args:
            kind: What it is, see the class.
            bucket: Index of the bucket; -1 if it is about none or several.
            numel: Elements that it is about.
        """
        return None

    def end(self, span: Span) -> None:
        """A span that ``begin`` returned is over."""

    def instant(self, kind: str, bucket: int = -1, numel: int = 0) -> None:
        """Something happened at once."""

    def step_begin(self) -> None:
        """A step begins; the one before it is over."""


SILENT = Recorder()


class Recorders(Recorder):
    """Hands everything on to several recorders.

    Args:
        recorders: Those who listen.
    """

    is_silent = False

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)
        self._is_paused = False

    def pause(self) -> None:
        """Hear nothing until the next step begins; spans under way still end."""
        self._is_paused = True

    def resume(self) -> None:
        """Hear again."""
        self._is_paused = False

    def begin(self, kind: str, bucket: int = -1, numel: int = 0) -> Span:
        """See the base class."""
        if self._is_paused:
            return None
        return [recorder.begin(kind, bucket, numel) for recorder in self._recorders]

    def end(self, span: Span) -> None:
        """See the base class."""
        if span is not None:
            # The one that began last ends first: each span holds those of the later recorders.
            for recorder, part in zip(reversed(self._recorders), reversed(span), strict=True):
                recorder.end(part)

    def instant(self, kind: str, bucket: int = -1, numel: int = 0) -> None:
        """See the base class."""
        if not self._is_paused:
            for recorder in self._recorders:
                recorder.instant(kind, bucket, numel)

    def step_begin(self) -> None:
        """See the base class."""
        self._is_paused = False
        for recorder in self._recorders:
            recorder.step_begin()
