"""``load_state_dict`` that users call themselves, on a module and optimizers that an engine has.

Both take full tensors, the same on all ranks, as they do without an engine; each rank keeps its
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.pieces import parameters_of
from lightning_zero.prefetch.hooks import Hook


class DirectLoads:
    """Lets a module and its optimizers take full states; ``remove`` takes it off again.

    Args:
        engine: Has the module and the optimizers.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._scope = ExitStack()
        module: Any = engine.module  # the methods have no types
        self._handles: list[Any] = [
            module.register_load_state_dict_pre_hook(Hook(self._enter)),
            module.register_load_state_dict_post_hook(Hook(self.leave)),
        ]
        self.watch(engine.optimizers)

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers take full states."""
        for optimizer in optimizers:
            states = _FullStates(self._engine)
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(states.keep),
                optimizer.register_load_state_dict_post_hook(states.cut),
            ]

    def remove(self) -> None:
        """Take everything off."""
        self.leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def leave(self) -> None:
        """The module is loaded, or loading it has failed."""
        self._scope.close()

    def _enter(self) -> None:
        self.leave()
        self._scope.enter_context(self._engine.loading())


class _FullStates:
    """Keeps what an optimizer is given, and cuts this rank's pieces from it afterwards."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._given: Mapping[str, Any] | None = None

    def keep(self, optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        """Called before a state is loaded; that of pieces is left alone."""
        if not any(parameter in self._engine.names for parameter in parameters_of(optimizer)):
            return None
        self._given = given
        return {**given, "state": {}}

    def cut(self, optimizer: Optimizer) -> None:
        """Called after it."""
        given, self._given = self._given, None
        if given is not None:
            self._engine.load_optimizer_state_dict(optimizer, dict(given))
