"""The two forms of a checkpoint: one ordinary file, or a folder that all ranks write at once.

Lightning asks for the states of the model and of each optimizer first, lets hooks see and change
them, and has the result written then. A form decides what stands for a full tensor in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.collected import (
    ValueParts,
    WeightParts,
    optimizer_parts,
    stored_optimizer_state,
)
from lightning_zero.checkpoint.consolidated import full_values
from lightning_zero.checkpoint.names import with_plain_names
from lightning_zero.checkpoint.saves import ShardedSaves
from lightning_zero.checkpoint.sliced import resting_state_dict
from lightning_zero.checkpoint.stored import Part
from lightning_zero.comm import ShardGroups
from lightning_zero.engine import ZeroEngine
from lightning_zero.params.sliced import owner_of

State = dict[str, Any]
Write = Callable[[State], None]


class CheckpointForm(ABC):
    """What a checkpoint is made of, and how it is written; for all ranks to call."""

    @abstractmethod
    def module_state(self, engine: ZeroEngine | None, module: nn.Module) -> State:
        """State dict of the model, as hooks see it.

        Args:
            engine: The engine that has the model's parameters; None if none has.
            module: The model.
        """

    @abstractmethod
    def optimizer_state(self, engine: ZeroEngine, optimizer: Optimizer, index: int) -> State:
        """State dict of an optimizer, as hooks see it.

        Args:
            engine: The engine that trains, or has trained, with it.
            optimizer: The user's optimizer.
            index: Its number among the optimizers.
        """

    @abstractmethod
    def other_values(
        self, engine: ZeroEngine, label: str, values: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Any]:
        """Full values of what is trained, other than the weights, as hooks see them.

        Args:
            engine: The engine that trains.
            label: What they are, for the names of tensors in a checkpoint.
            values: A tensor of the shape of each of this rank's pieces.
        """

    @abstractmethod
    def save(self, checkpoint: State, path: str, write: Write, is_training: bool) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: What the hooks have left.
            path: Where to.
            write: Writes an ordinary file.
            is_training: More calls will follow.
        """

    @abstractmethod
    def remove(self, path: str, remove: Callable[[], None]) -> None:
        """Remove a checkpoint.

        Args:
            path: The checkpoint.
            remove: Removes an ordinary file.
        """

    @abstractmethod
    def finish(self, timeout: timedelta | None = None) -> None:
        """Wait until everything is written.

        Args:
            timeout: Longest wait; None for no limit but that of the transfers.

        Raises:
            RuntimeError: Something could not be written.
        """


class ConsolidatedForm(CheckpointForm):
    """One file with full tensors, gathered on rank 0."""

    def module_state(self, engine: ZeroEngine | None, module: nn.Module) -> State:
        """See the base class; empty on ranks other than 0 where tensors have to be gathered."""
        state = resting_state_dict(module) if engine is None else engine.module_state_dict(module)
        return with_plain_names(state)

    def optimizer_state(self, engine: ZeroEngine, optimizer: Optimizer, index: int) -> State:
        """See the base class."""
        return engine.optimizer_state_dict(optimizer)

    def other_values(
        self, engine: ZeroEngine, label: str, values: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Any]:
        """See the base class; empty on ranks other than 0."""
        return full_values(values, engine.table, engine.groups.control)

    def save(self, checkpoint: State, path: str, write: Write, is_training: bool) -> None:
        """See the base class."""
        write(checkpoint)

    def remove(self, path: str, remove: Callable[[], None]) -> None:
        """See the base class."""
        remove()

    def finish(self, timeout: timedelta | None = None) -> None:
        """See the base class."""


class ShardedForm(CheckpointForm):
    """A folder to which every rank writes what it holds, while training goes on."""

    def __init__(self, groups: Callable[[], ShardGroups]) -> None:
        self._groups = groups
        self._saves: ShardedSaves | None = None
        self._weights: WeightParts | None = None
        self._optimizers: dict[int, tuple[ZeroEngine, Optimizer]] = {}
        self._values: list[ValueParts] = []

    def module_state(self, engine: ZeroEngine | None, module: nn.Module) -> State:
        """See the base class; a ``StoredTensor`` stands for every parameter."""
        slices = owner_of(module) if engine is None else None
        if slices is not None:
            slices.rest()
        names = {parameter: name for name, parameter in module.named_parameters()}
        buckets = () if engine is None else engine.buckets
        self._optimizers.clear()
        self._values.clear()
        self._weights = WeightParts(names, buckets, self._groups().control, slices)
        with nullcontext() if engine is None else engine.sharded_state_dict():
            return self._weights.put_into(module.state_dict())

    def optimizer_state(self, engine: ZeroEngine, optimizer: Optimizer, index: int) -> State:
        """See the base class; a ``StoredTensor`` stands for every element-wise state."""
        self._optimizers[index] = engine, optimizer
        return stored_optimizer_state(
            optimizer, index, engine.table, engine.names, self._groups().control
        )

    def other_values(
        self, engine: ZeroEngine, label: str, values: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Any]:
        """See the base class; a ``StoredTensor`` stands for each."""
        parts = ValueParts(label, values, engine.table, engine.names, self._groups().control)
        self._values.append(parts)
        return dict(parts.stored)

    def save(self, checkpoint: State, path: str, write: Write, is_training: bool) -> None:
        """See the base class.

        Raises:
            ValueError: The path is no local one.
            RuntimeError: The save before has failed.
        """
        if "://" in path:
            raise ValueError(
                f"checkpoint='sharded' writes to a folder that all ranks see, not to {path!r}. Save"
                " to a folder, or use checkpoint='consolidated', which writes to any fsspec path."
            )
        if self._saves is None:
            self._saves = ShardedSaves(self._groups())
        self._saves.begin(Path(path), checkpoint, self._parts)
        self._weights = None
        self._optimizers.clear()
        self._values.clear()
        if not is_training:
            self._saves.wait()

    def remove(self, path: str, remove: Callable[[], None]) -> None:
        """See the base class; while a save is under way, after it."""
        if self._saves is None:
            remove()
        else:
            self._saves.remove(Path(path))

    def finish(self, timeout: timedelta | None = None) -> None:
        """See the base class."""
        saves, self._saves = self._saves, None  # its groups may come to rest
        if saves is not None:
            saves.wait(timeout)

    def _parts(self) -> Sequence[Part]:
        parts = list(self._weights or ())
        control = self._groups().control
        for index, (engine, optimizer) in self._optimizers.items():
            parts += optimizer_parts(optimizer, index, engine.table, engine.names, control)
        parts += chain.from_iterable(self._values)
        return parts


def form_of(name: str, groups: Callable[[], ShardGroups]) -> CheckpointForm:
    """The form of checkpoints of a name.

    Args:
        name: ``"consolidated"`` or ``"sharded"``.
        groups: Gives groups of all ranks.
    """
    return ShardedForm(groups) if name == "sharded" else ConsolidatedForm()
