"""Models that were set up, and their engines.

[Note: one engine per model]
Each ``fabric.setup`` makes an engine, with process groups of its own: a backward through two models
sends the gradients of both, and ranks may come to them in another order. A model lives as long as
the user holds it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_zero.direct_loads import DirectLoads
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.pieces import parameters_of


class ZeroModule(nn.Module):
    """A model that was set up: it runs as before, and an engine has its parameters.

    Args:
        module: The user's module.
        engine: Its engine.
    """

    def __init__(self, module: nn.Module, engine: ZeroEngine) -> None:
        super().__init__()
        self.module = module
        self.engine = engine
        self.loads = DirectLoads(engine)
        self._cut_states(engine.optimizers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the user's module returns."""
        return self.module(*args, **kwargs)

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Train with more optimizers.

        Args:
            optimizers: Over parameters of the module.

        Raises:
            ValueError: An optimizer cannot be used.
        """
        self.engine.optimizers = [*self.engine.optimizers, *optimizers]
        self.loads.watch(optimizers)
        self._cut_states(optimizers)

    def close(self) -> None:
        """Give the module its parameters back, whole; to be called on all ranks."""
        self.loads.remove()
        self.engine.close()

    def _cut_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Optimizers go on from the full states that they have."""
        for optimizer in optimizers:
            if optimizer.state:
                self.engine.load_optimizer_state_dict(optimizer, optimizer.state_dict())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy belongs to no engine; its weights are whole if they are whole now."""
        twin: nn.Module = copy.deepcopy(self.module, memo)
        return twin


class SetUpModels:
    """The models of one Fabric, as long as somebody else holds them."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[ZeroModule]] = []  # a WeakSet cannot go to spawned ranks

    def __iter__(self) -> Iterator[ZeroModule]:
        alive = [model for each in self._models if (model := each()) is not None]
        return iter([model for model in alive if model.engine.is_open])

    def add(self, model: ZeroModule) -> None:
        """Remember a model."""
        self._models = [weakref.ref(each) for each in self] + [weakref.ref(model)]

    def with_module(self, module: nn.Module) -> ZeroModule | None:
        """The model that a module is, or is a part of; None for one that was not set up."""
        for model in self:
            if module is model or any(module is each for each in model.module.modules()):
                return model
        return None

    def with_optimizer(self, optimizer: Optimizer) -> ZeroModule | None:
        """The model that an optimizer trains; None for one that was not set up."""
        for model in self:
            if any(optimizer is each for each in model.engine.optimizers):
                return model
        return None

    def holding_parameters_of(self, optimizer: Optimizer) -> list[ZeroModule]:
        """Models that have some of an optimizer's parameters."""
        wanted = list(parameters_of(optimizer))
        return [model for model in self if any(p in model.engine.names for p in wanted)]
