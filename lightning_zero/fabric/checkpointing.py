"""What a Fabric asks of a strategy about checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import sharded
from lightning_zero.checkpoint.files import usable_io
from lightning_zero.checkpoint.names import with_names_of
from lightning_zero.checkpoint.stored import loaded, read_when_loaded
from lightning_zero.checks import check_form, check_storage_options
from lightning_zero.comm import ShardGroups
from lightning_zero.comm.agreed import failing_together
from lightning_zero.fabric.loans import LOANS
from lightning_zero.fabric.models import SetUpModels, ZeroModule
from lightning_zero.formats import form_of
from lightning_zero.params.sliced import opened

State = dict[str, Any]
Keep = Callable[[str, Any], bool]


class CheckpointingStrategy(DDPStrategy):
    """Writes and reads the states of models and optimizers that were set up.

    Args:
        checkpoint: ``"consolidated"`` or ``"sharded"``.
        checkpoint_io: As for ``DDPStrategy``.
        **options: As for ``DDPStrategy``.
    """

    def __init__(self, checkpoint: str, checkpoint_io: CheckpointIO | None, **options: Any) -> None:
        check_form(checkpoint, checkpoint_io)
        self._checkpoint = checkpoint
        self._form = form_of(checkpoint, self._shard_groups)
        self._models = SetUpModels()
        self._groups: ShardGroups | None = None
        super().__init__(checkpoint_io=checkpoint_io, **options)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = usable_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        check_form(self._checkpoint, io)
        self._checkpoint_io = io

    # Saving.

    @override
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: State,
        storage_options: Any | None = None,
        filter: Mapping[str, Keep] | None = None,
    ) -> None:
        path = os.fspath(path)
        check_storage_options(self._checkpoint, storage_options)
        if self._checkpoint == "sharded":
            self._check_sharded(state)
        checkpoint = self._taken(state, filter or {})

        def write(checkpoint: State) -> None:
            with self._failing_together(f"save the checkpoint {path}"):
                if self.is_global_zero:
                    self.checkpoint_io.save_checkpoint(
                        checkpoint=checkpoint, path=path, storage_options=storage_options
                    )

        self._form.save(checkpoint, path, write, is_training=False)

    @override
    def get_module_state_dict(self, module: nn.Module) -> State:
        model = self._models.with_module(module)
        return self._form.module_state(None if model is None else model.engine, _plain(module))

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> State:
        model = self._models.with_optimizer(optimizer)
        if model is None:
            return optimizer.state_dict()
        return model.engine.optimizer_state_dict(optimizer)

    def _taken(self, state: State, filters: Mapping[str, Keep]) -> State:
        """The states of all that has one, on rank 0; modules come first, as a form wants it."""
        taken: State = {}
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        for name in _modules_first(state):
            value = state[name]
            if isinstance(value, nn.Module):
                value = self.get_module_state_dict(value)
            elif isinstance(value, Optimizer):
                model = self._models.with_optimizer(value)
                index = next(n for n, each in enumerate(optimizers) if each is value)
                value = (
                    value.state_dict()
                    if model is None
                    else self._form.optimizer_state(model.engine, value, index)
                )
            elif _has_state(value):
                value = value.state_dict()
            if name in filters and isinstance(value, dict):
                value = {key: each for key, each in value.items() if filters[name](key, each)}
            taken[name] = value
        return {name: taken[name] for name in state}

    def _check_sharded(self, state: State) -> None:
        modules = [name for name, value in state.items() if isinstance(value, nn.Module)]
        if len(modules) != 1:
            raise ValueError(
                "checkpoint='sharded' writes one model with its optimizers to a folder, but the"
                f" state has {len(modules)} modules ({modules}). Save each model to a folder of"
                " its own, or use checkpoint='consolidated'."
            )

    # Loading.

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: nn.Module | Optimizer | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> State:
        checkpoint = self._read(os.fspath(path), weights_only)
        if isinstance(state, nn.Module):
            self.load_module_state_dict(state, checkpoint, strict)
            return {}
        if isinstance(state, Optimizer):
            self._load_optimizer(state, checkpoint)
            return {}
        if not state:
            return dict(loaded(checkpoint))
        missing = [name for name in state if name not in checkpoint]
        if strict and missing:
            raise KeyError(
                f"the checkpoint {path} has no {missing}, only {sorted(checkpoint)}: ask for what"
                " it has, or pass strict=False to leave the rest as it is"
            )
        for name in _modules_first(state):
            if name in checkpoint:
                self._restore(state, name, checkpoint.pop(name), strict)
        return dict(loaded(checkpoint))

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: State, strict: bool = True
    ) -> None:
        model = self._models.with_module(module)
        module = _plain(module)
        if model is None:
            names, scope = list(module.state_dict()), opened(module)
        else:
            with model.engine.sharded_state_dict():
                names = list(module.state_dict())
            scope = model.engine.loading()
        with scope, read_when_loaded(module):
            module.load_state_dict(with_names_of(state_dict, names), strict=strict)

    def _restore(self, state: State, name: str, saved: Any, strict: bool) -> None:
        value = state[name]
        if isinstance(value, nn.Module):
            self.load_module_state_dict(value, saved, strict)
        elif isinstance(value, Optimizer):
            self._load_optimizer(value, saved)
        elif _has_state(value):
            value.load_state_dict(loaded(saved))
        else:
            state[name] = loaded(saved)

    def _load_optimizer(self, optimizer: Optimizer, saved: State) -> None:
        model = self._models.with_optimizer(optimizer)
        if model is None:
            optimizer.load_state_dict(loaded(saved))
        else:
            model.engine.load_optimizer_state_dict(optimizer, saved)

    def _read(self, path: str, weights_only: bool | None) -> State:
        if Path(path).is_dir():
            return sharded.read(Path(path), weights_only, self._shard_groups().control)
        with self._failing_together(f"read the checkpoint {path}"):
            return dict(self.checkpoint_io.load_checkpoint(path, weights_only=weights_only))

    # Ranks.

    def _shard_groups(self) -> ShardGroups:
        """Groups for what no engine does; to be called on all ranks, the first time."""
        if self._groups is None:
            self._groups = LOANS.lend(self._timeout)
            LOANS.keep(self, self._groups)
        return self._groups

    def _failing_together(self, what: str) -> AbstractContextManager[None]:
        """An error of one rank inside is raised on all of them."""
        return failing_together(self._shard_groups().control, what)


def _plain(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, ZeroModule) else module


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _modules_first(state: State) -> list[str]:
    return sorted(state, key=lambda name: not isinstance(state[name], nn.Module))
