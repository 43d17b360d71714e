"""Optimizer steps that are called past the engine.

[Note: raw steps]
``trainer.optimizers[0].step()``, or the step of an optimizer that was never handed over, would step
the NaN that stand for gradients. torch tells of every step before and after it, so that a raw step
is made one of the engine's: it finds this rank's pieces in the groups, as any step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_zero.global_hooks import GlobalHooks
from lightning_zero.optim.pieces import parameters_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a step, the optimizer itself included."""


class SteppingEngine(Protocol):
    """What raw steps need of an engine."""

    names: dict[nn.Parameter, str]
    """The parameters of the model."""

    optimizers: Sequence[Optimizer]
    """The optimizers that were handed over; more are checked when they are set."""

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Scope in which an optimizer steps pieces."""


class RawSteps:
    """Makes raw steps over a model's parameters steps of its engine, see [Note: raw steps].

    Args:
        engine: The engine.
    """

    def __init__(self, engine: SteppingEngine) -> None:
        self._engine = engine
        self._under_way: dict[Optimizer, AbstractContextManager[None]] = {}
        this = weakref.ref(self)  # torch's hooks are global: they must not keep an engine alive

        def before(optimizer: Optimizer, args: Any, options: Any) -> Arguments | None:
            steps = this()
            return None if steps is None else steps._before(optimizer, args, options)

        def after(optimizer: Optimizer, args: Any, options: Any) -> None:
            steps = this()
            if steps is not None:
                steps._after(optimizer)

        handles = [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]
        self._hooks = GlobalHooks(self, handles)

    def close(self) -> None:
        """Look at no more steps."""
        self.abort()
        self._hooks.remove()

    def abort(self) -> None:
        """Leave a step that has raised."""
        while self._under_way:
            _, scope = self._under_way.popitem()
            error = RuntimeError("an optimizer step has raised")
            with suppress(RuntimeError):
                scope.__exit__(RuntimeError, error, None)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Arguments | None:
        if optimizer in self._under_way:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called although an earlier step of it has"
                " raised, or is still under way: go on from a checkpoint"
            )
        # A step that the engine runs itself finds pieces in the groups, no parameters.
        names = self._engine.names
        if not any(parameter in names for parameter in parameters_of(optimizer)):
            return None
        found = _with_closure_run(args, options)
        known = self._engine.optimizers
        if not any(optimizer is one for one in known):
            self._engine.optimizers = [*known, optimizer]
        scope = self._engine.stepping(optimizer)
        scope.__enter__()
        self._under_way[optimizer] = scope
        return found

    def _after(self, optimizer: Optimizer) -> None:
        scope = self._under_way.pop(optimizer, None)
        if scope is not None:
            scope.__exit__(None, None, None)


def _with_closure_run(args: tuple[Any, ...], options: dict[str, Any]) -> Arguments:
    """Arguments of a step whose closure has run: gradients are averaged when it ends."""
    closure = args[1] if len(args) > 1 else options.get("closure")
    if closure is None:
        return args, options
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), options
    return args, {**options, "closure": lambda: loss}
