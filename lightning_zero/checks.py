"""What is refused before training, and why."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero import _compat
from lightning_zero.checkpoint.files import ZeroCheckpointIO
from lightning_zero.engine import ZeroEngine


def check_form(form: str, checkpoint_io: CheckpointIO | None) -> None:
    """Whether a form of checkpoints exists, and a plugin for files has an effect with it.

    Raises:
        ValueError: It does not, or has not.
    """
    if form not in ("consolidated", "sharded"):
        raise ValueError(f"checkpoint must be 'consolidated' or 'sharded', got {form!r}")
    usual = (TorchCheckpointIO, ZeroCheckpointIO)
    if form == "sharded" and checkpoint_io is not None and type(checkpoint_io) not in usual:
        raise ValueError(
            f"{type(checkpoint_io).__name__} has no effect with checkpoint='sharded': all ranks"
            " write their files themselves, while training goes on. Remove one of the two."
        )


def check_callbacks(trainer: Any, shards_parameters: bool, excludes_frozen: bool) -> None:
    """Callbacks that would average placeholders, or write checkpoints that nobody can go on from.

    Args:
        trainer: Is about to fit.
        shards_parameters: Weights are not in memory between steps.
        excludes_frozen: Checkpoints are to have no frozen parameters.

    Raises:
        ValueError: There is one.
    """
    for callback in _compat.callbacks_of(trainer):
        is_averaging = isinstance(callback, WeightAveraging)
        if shards_parameters and (is_averaging or isinstance(callback, StochasticWeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} averages full weights on every rank, which are not"
                " in memory at stage 3. Use lightning_zero.ZeroEMA, which averages each rank's"
                " shards, or stage 1 or 2."
            )
        if excludes_frozen and is_averaging:
            raise ValueError(
                f"exclude_frozen_parameters=True has no effect on what {type(callback).__name__}"
                " writes, and it could not go on from such a checkpoint. Use lightning_zero.ZeroEMA"
                " instead, or remove the option."
            )


def reads_whole_weights(trainer: Any) -> bool:
    """Whether a callback hands weights of a checkpoint to torch itself."""
    return any(isinstance(each, WeightAveraging) for each in _compat.callbacks_of(trainer))


def check_backend(backend: str | None, device_type: str) -> None:
    """Whether a backend can send tensors of a device.

    Raises:
        ValueError: It cannot.
    """
    if backend == "gloo" and device_type != "cpu":
        raise ValueError(
            f"process_group_backend='gloo' cannot send tensors of {device_type!r}"
            " from rank to rank. Leave it out: the backend of the device is the default."
        )


def check_started_ranks(
    environment: ClusterEnvironment | None, num_nodes: int, num_processes: int
) -> None:
    """Ranks that a launcher did not start would be waited for.

    Args:
        environment: Says who starts ranks.
        num_nodes: As the Trainer has it.
        num_processes: Ranks per node, as the Trainer has it.

    Raises:
        ValueError: Another number of ranks was started.
    """
    started = os.environ.get("WORLD_SIZE")
    if environment is None or not environment.creates_processes_externally or not started:
        return
    wanted = num_nodes * num_processes
    if int(started) != wanted:
        raise ValueError(
            f"the Trainer expects {wanted} rank(s) (devices={num_processes} x"
            f" num_nodes={num_nodes}), but {started} were started (WORLD_SIZE={started})."
            " Make the two numbers equal."
        )


def check_storage_options(form: str, storage_options: Any | None) -> None:
    """Whether options for a file system have an effect with a form of checkpoints.

    Raises:
        ValueError: They have none.
    """
    if storage_options is not None and form == "sharded":
        raise ValueError("storage_options have no effect with checkpoint='sharded': remove them")


def warn_of_idle_options(engine: ZeroEngine) -> None:
    """Say so where something was asked for that has no effect on this model."""
    options = engine.options
    given = {
        "offload_optimizer": options.offload_optimizer,
        "offload_parameters": options.offload_parameters,
    }
    configs = options.offload.optimizer, options.offload.parameters
    copied = [
        name
        for (name, value), config in zip(given.items(), configs, strict=True)
        if value is not None and config is not None and config.device == "cpu"
    ]
    if copied and engine.device.type == "cpu":
        rank_zero_warn(
            f"{' and '.join(copied)} has no effect on a model on the CPU but copies: what is"
            " offloaded lies in the same memory, which nothing is saved of. Leave it out here, or"
            " offload to 'nvme'; on an accelerator it frees the device's memory."
        )
    if engine.options.master_weights and not any(m.has_copy for m in engine.table.masters):
        rank_zero_warn(
            "ZeroStrategy(master_weights=True) has no effect: all trained parameters are fp32"
            " already, so the optimizer steps them directly."
        )
