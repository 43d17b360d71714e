"""Options of what is fetched ahead, kept and released at stage 3."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(kw_only=True, frozen=True, slots=True)
class PrefetchOptions:
    """How much of the parameters may be in memory, and how early they come. In elements.

    Raises:
        ValueError: A value is out of range.
    """

    prefetch_numel: int | None = None
    """How far ahead of use buckets are fetched; 0 for never, None for two buckets."""

    max_live_numel: int | None = None
    """Most elements of full parameters in memory at any time, a hard bound; None for no bound."""

    reuse_distance_numel: int | None = None
    """Keep a bucket if no more than this is used before its own next use; 0 keeps it only if its
    own use comes next, None if at most two other buckets come before it."""

    persistent_numel: int = 0
    """Parameters up to this size are never released; their optimizer state is sharded still."""

    persistent_total_numel: int | None = None
    """Most elements that stay for ``persistent_numel``, in model order; None for no bound."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"{field.name} must be a number of elements, 0 or more, got {value!r}"
                )
        if self.max_live_numel == 0:
            raise ValueError("max_live_numel must be at least the size of one bucket, got 0")
        if self.persistent_total_numel is not None and not self.persistent_numel:
            raise ValueError(
                "persistent_total_numel has no effect without persistent_numel: set both, or none"
            )
