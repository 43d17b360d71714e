"""Loads native libraries at their first use; what cannot be loaded is told once."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lightning_zero.ops.build import build
from lightning_zero.ops.sources import BuildError, LibrarySources

CHOICE = "LIGHTNING_ZERO_OPS"
CHOICES = ("native", "reference")


@dataclass(slots=True)
class NativeLibrary:
    """A library that is tried once in a process."""

    sources: LibrarySources

    what_is_slower: str
    """Without it, for the warning."""

    on_load: Callable[[], None]

    is_loaded: bool | None = None
    """None until it was tried."""

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_there(self) -> bool:
        """Whether the library can be used; builds and loads it when first asked.

        Warns once, if it can not, of what is slower for it.
        """
        if self.is_loaded is None:
            with self._lock:
                return self._tried()
        return self.is_loaded

    def _tried(self) -> bool:
        """The result of the first try, which another thread may have made in between."""
        if self.is_loaded is None:
            self.is_loaded = self._load()
        return self.is_loaded

    def _load(self) -> bool:
        if is_reference_chosen():
            return False
        load: Callable[[str], None] = torch.ops.load_library
        try:
            load(str(build(self.sources)))
        except (BuildError, OSError) as error:
            warnings.warn(
                f"{self.what_is_slower}, because native code is not built: {error}. "
                f"`lightning-zero doctor` tells more; {CHOICE}=reference takes plain PyTorch "
                "without this warning",
                stacklevel=2,
            )
            return False
        self.on_load()
        return True


def is_reference_chosen() -> bool:
    """Whether the environment asks for plain PyTorch.

    Raises:
        ValueError: The variable is set to something else than its two choices.
    """
    choice = os.environ.get(CHOICE, CHOICES[0])
    if choice not in CHOICES:
        raise ValueError(f"{CHOICE}={choice}: must be one of {', '.join(CHOICES)}")
    return choice == "reference"
