"""A step that is made within the user's ``optimizer.step()``, in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.optim.bucket_steps import grouped
from lightning_zero.optim.masters import HostMaster
from lightning_zero.optim.pieces import PieceTable

Used = frozenset[nn.Parameter]
"""Parameters that some rank has a gradient for."""


class HookedStep(ABC):
    """One step of an optimizer, made in a hook before its own, which then has nothing left to do.

    Args:
        optimizer: The user's optimizer, which names parameters now.
        table: This rank's pieces.
        used: Parameters that some rank has a gradient for.
    """

    def __init__(self, optimizer: Optimizer, table: PieceTable, used: Used) -> None:
        self._optimizer = optimizer
        self._table = table
        self._used = used
        self._groups = grouped(optimizer, table, used)
        self._has_hooks = _compat.has_step_hooks(optimizer)
        """Hooks of the user look at what is stepped, before and after it."""

    @contextmanager
    def within(self) -> Iterator[None]:
        """While inside, the optimizer names pieces, and its step makes this one."""
        # The last of the user's own hooks comes before it, and sees what is about to be stepped.
        handle = self._optimizer.register_step_pre_hook(self._run)
        hidden: Used = frozenset()
        if self._has_hooks:
            self._show()
        else:
            hidden = self._hidden()
        try:
            with self._table.swapped(self._optimizer, self._used - hidden):
                yield
        finally:
            handle.remove()

    def _show(self) -> None:  # noqa: B027  (what is in place is shown as it is)
        """Let hooks of the user see what there is."""

    def _hidden(self) -> Used:
        """Parameters whose gradients need not be made for the optimizer to see."""
        return frozenset(
            piece.parameter
            for master, groups in self._groups.items()
            if isinstance(master, HostMaster) and not master.has_made_grad
            for group in groups
            for piece in group.pieces
        )

    @torch.no_grad()
    def _run(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # of a loss scaler: the step is left out
        if found_inf is None or not bool(found_inf):
            self._step(optimizer)
        for groups in self._groups.values():
            for group in groups:
                for piece in group.pieces:
                    piece.tensor.grad = None
        self._groups.clear()

    @abstractmethod
    def _step(self, optimizer: Optimizer) -> None:
        """Make the step; the optimizer names pieces now."""
