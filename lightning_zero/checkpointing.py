"""What a Trainer asks of a strategy about checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import _compat
from lightning_zero.checkpoint import sharded
from lightning_zero.checkpoint.files import usable_io
from lightning_zero.checkpoint.names import frozen_names, plain_name, with_names_of
from lightning_zero.checkpoint.restored import RestoreWarning, told_of_count
from lightning_zero.checkpoint.stored import loaded, read_when_loaded
from lightning_zero.checks import check_form, check_storage_options, reads_whole_weights
from lightning_zero.comm import ShardGroups
from lightning_zero.comm.agreed import failing_together
from lightning_zero.engine import ZeroEngine
from lightning_zero.formats import form_of
from lightning_zero.params.sliced import opened

WEIGHTS = ("state_dict", "current_model_state")
"""Where Lightning's callbacks have weights in a checkpoint."""


class CheckpointingStrategy(DDPStrategy):
    """Writes and reads the states of an engine as checkpoints that any strategy can use.

    Args:
        checkpoint: ``"consolidated"`` or ``"sharded"``.
        exclude_frozen_parameters: Leave parameters that are not trained out.
        checkpoint_io: As for ``DDPStrategy``.
        **options: As for ``DDPStrategy``.
    """

    def __init__(
        self,
        checkpoint: str,
        exclude_frozen_parameters: bool,
        checkpoint_io: CheckpointIO | None,
        **options: Any,
    ) -> None:
        check_form(checkpoint, checkpoint_io)
        self._checkpoint = checkpoint
        self._excludes_frozen = exclude_frozen_parameters
        self._form = form_of(checkpoint, self._shard_groups)
        self._engine: ZeroEngine | None = None
        self._optimizer_engine: ZeroEngine | None = None
        self._groups: ShardGroups | None = None
        self._rested_nbytes = 0
        super().__init__(checkpoint_io=checkpoint_io, **options)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = usable_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        if module is None:
            raise RuntimeError("there is no model to take a state dict of")
        state = self._form.module_state(self._engine, module)
        if self._excludes_frozen:
            for name in frozen_names(module):
                state.pop(name, None)
        return state

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state, strict = self._own_names(checkpoint["state_dict"], strict)
        checkpoint = {**checkpoint, "state_dict": state}
        scope = opened(self.lightning_module)
        if self._engine is not None:
            scope = self._engine.loading()
        with scope, read_when_loaded(self._loaded_module()):
            super().load_model_state_dict(checkpoint, strict=strict)

    def state_dict_with(
        self, state: Mapping[str, Any], label: str, values: Mapping[nn.Parameter, Tensor]
    ) -> dict[str, Any]:
        """A state dict of the model with other values of what is trained, for a checkpoint.

        To be called on all ranks, in ``on_save_checkpoint``.

        Args:
            state: The state dict of the model in that checkpoint.
            label: What the values are, as a name of their own in a sharded checkpoint.
            values: A tensor of the shape of each of this rank's pieces of parameters.
        """
        engine = self._running_engine("state_dict_with")
        full = self._form.other_values(engine, label, values)
        with engine.sharded_state_dict():
            own = engine.module.state_dict(keep_vars=True)
        named = {plain_name(name): full[p] for name, p in own.items() if p in full}
        return {name: named.get(name, value) for name, value in state.items()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        engine = self._optimizer_engine
        if engine is None:
            return super().optimizer_state(optimizer)
        plain = _compat.plain_optimizer(optimizer)
        index = [_compat.plain_optimizer(known) for known in self.optimizers].index(plain)
        return self._form.optimizer_state(engine, plain, index)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        check_storage_options(self._checkpoint, storage_options)
        write = partial(super().save_checkpoint, filepath=filepath, storage_options=storage_options)
        path = os.fspath(filepath)

        def write_together(checkpoint: dict[str, Any]) -> None:
            with self._failing_together(f"save the checkpoint {path}"):
                write(checkpoint)

        self._form.save(checkpoint, path, write_together, self._engine is not None)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        remove = partial(super().remove_checkpoint, filepath)
        self._form.remove(os.fspath(filepath), remove)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._form.finish()
        path = Path(os.fspath(checkpoint_path))
        if not path.is_dir():
            with self._failing_together(f"read the checkpoint {path}"):
                return super().load_checkpoint(checkpoint_path, weights_only)
        checkpoint = sharded.read(path, weights_only, self._shard_groups().control)
        module = self.lightning_module
        trainer = None if module is None else _compat.trainer_of(module)
        if trainer is not None and reads_whole_weights(trainer):
            whole = {key: checkpoint[key] for key in WEIGHTS if key in checkpoint}
            checkpoint |= loaded(whole)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        engine = self._running_engine("load_optimizer_state_dict")
        states = checkpoint["optimizer_states"]
        if notice := told_of_count(len(self.optimizers), len(states)):
            rank_zero_warn(notice, category=RestoreWarning)
        for optimizer, state in zip(self.optimizers, states, strict=False):
            engine.load_optimizer_state_dict(_compat.plain_optimizer(optimizer), state)

    def _loaded_module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("there is no model to load weights into")
        return self.lightning_module

    def _own_names(self, state: Mapping[str, Any], strict: bool) -> tuple[dict[str, Any], bool]:
        """A saved state dict as this model names it, and whether torch is to be strict about it."""
        module = self._loaded_module()
        with nullcontext() if self._engine is None else self._engine.sharded_state_dict():
            own = list(module.state_dict())
        named = with_names_of(state, own)
        if not (strict and self._excludes_frozen):
            return named, strict
        frozen = frozen_names(module)
        missing = [n for n in own if n not in named and plain_name(n) not in frozen]
        unexpected = sorted(named.keys() - set(own))
        if missing or unexpected:
            raise RuntimeError(
                f"the checkpoint does not fit {type(module).__name__}, frozen parameters aside:"
                f" missing {missing}, unexpected {unexpected}. Build the model as it was, or set"
                " strict_loading=False on the LightningModule."
            )
        return named, False

    def _shard_groups(self) -> ShardGroups:
        """The groups of ranks; to be called on all ranks, the first time."""
        self._groups = self._groups or ShardGroups.create(self._timeout)
        return self._groups

    def _let_groups_rest(self) -> None:
        """A run has ended, on all ranks; whoever needs groups next takes them again."""
        groups, self._groups = self._groups, None
        if groups is not None:
            self._rested_nbytes += groups.sent_nbytes
            groups.rest()

    def _failing_together(self, what: str) -> AbstractContextManager[None]:
        """An error of one rank inside is raised on all of them, if they are connected."""
        is_connected = self.lightning_module is not None
        return failing_together(self._shard_groups().control if is_connected else None, what)

    def _running_engine(self, what: str) -> ZeroEngine:
        if self._engine is None:
            raise RuntimeError(
                f"{type(self).__name__}.{what}() needs a fit that is running: call it from a hook"
                " of the LightningModule or of a callback"
            )
        return self._engine
