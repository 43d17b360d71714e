"""What of the model states each rank keeps: parameters, gradients, state of the optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.geometry import state_nbytes_per_element
from lightning_zero.optim.masters import MasterShard

MIB = 2**20


@dataclass(frozen=True, slots=True)
class StateShare:
    """One model state: all of it, and what this rank keeps."""

    name: str
    """What it is."""

    total_nbytes: float
    """Bytes without any sharding."""

    rank_nbytes: float
    """Bytes on this rank, padding of buckets included, wherever they are."""

    host_nbytes: float = 0.0
    """Those of them that are in host memory, or in files."""

    def row(self, has_host: bool = False) -> str:
        """A line of the table.

        Args:
            has_host: Say what is on the host, too.
        """
        share = self.rank_nbytes / self.total_nbytes if self.total_nbytes else 0.0
        total, here = self.total_nbytes / MIB, self.rank_nbytes / MIB
        line = f"{self.name:<12} | {total:>12,.2f} | {here:>14,.2f} | {share:>6.1%}"
        return line + f" | {self.host_nbytes / MIB:>12,.2f}" * has_host


@dataclass(frozen=True, slots=True)
class ModelShares:
    """How the states of a model are spread over the ranks; as text, a small table."""

    stage: int
    """Stage of ZeRO."""

    world_size: int
    """Ranks that share the states."""

    trainable_numel: int
    """Elements of the parameters that are trained."""

    frozen_numel: int
    """Elements of all other parameters."""

    rank_numel: int
    """Elements of the parameters that this rank keeps between their uses, without padding."""

    states: tuple[StateShare, ...]
    """Parameters, gradients, optimizer."""

    unknown: tuple[str, ...] = ()
    """Optimizers whose state is not counted, since it depends on the shapes of parameters."""

    @property
    def total_numel(self) -> int:
        """Elements of all parameters."""
        return self.trainable_numel + self.frozen_numel

    def __str__(self) -> str:
        has_host = any(state.host_nbytes for state in self.states)
        heading = f"{'':<12} | {'all, MiB':>12} | {'this rank, MiB':>14} | {'share':>6}"
        heading += " | on host, MiB" * has_host
        total = StateShare(
            "total",
            sum(state.total_nbytes for state in self.states),
            sum(state.rank_nbytes for state in self.states),
            sum(state.host_nbytes for state in self.states),
        )
        lines = [
            f"{self.total_numel:,} parameters, {self.trainable_numel:,} trainable and"
            f" {self.frozen_numel:,} frozen; stage {self.stage} on {self.world_size} rank(s) keeps"
            f" {self.rank_numel:,} on this one",
            heading,
            "-" * len(heading),
            *(state.row(has_host) for state in (*self.states, total)),
        ]
        if self.unknown:
            lines.append(
                f"State of {', '.join(self.unknown)} is not counted: it depends on the shapes of"
                " parameters."
            )
        return "\n".join(lines)


def model_shares(engine: ZeroEngine, optimizers: Sequence[Optimizer]) -> ModelShares:
    """How an engine spreads its model, seen from this rank.

    Args:
        engine: The engine, about to train.
        optimizers: The user's optimizers. Their state comes into being with their first step, so it
            is told by a step of a twin.
    """
    numel = {parameter: parameter.numel() for parameter in engine.names}
    trainable_numel = sum(n for parameter, n in numel.items() if parameter in engine.table)
    coming = [bucket for bucket in engine.buckets if not bucket.is_resident]
    resident = [bucket for bucket in engine.buckets if bucket.is_resident]
    in_buckets = {parameter for bucket in engine.buckets for parameter in bucket.parameters}
    staying = [p for p in numel if p not in in_buckets]
    sharded = {parameter for bucket in coming for parameter in bucket.parameters}
    pieces_numel = sum(piece.numel for bucket in coming for piece in bucket.pieces())
    parameters = StateShare(
        "parameters",
        sum(n * p.element_size() for p, n in numel.items()),
        sum(b.layout.padded_numel * b.dtype.itemsize for b in resident)
        + sum(b.layout.shard_numel * b.dtype.itemsize for b in coming)
        + sum(numel[p] * p.element_size() for p in staying),
        sum(b.layout.shard_numel * b.dtype.itemsize for b in coming if b.home is not None),
    )
    states, unknown = _optimizer_share(engine, optimizers)
    return ModelShares(
        engine.options.stage,
        engine.groups.world_size,
        trainable_numel,
        sum(numel.values()) - trainable_numel,
        pieces_numel + sum(n for p, n in numel.items() if p not in sharded),
        (parameters, _gradient_share(engine), states),
        unknown,
    )


def _gradient_share(engine: ZeroEngine) -> StateShare:
    """Whole where they are collected whole."""
    total = here = on_host = 0
    for master in engine.table.masters:
        layout, item_nbytes = master.parameters.layout, master.gradients.shard_dtype.itemsize
        is_shard = engine.options.policy.shards_gradients or master.is_on_host
        nbytes = (layout.shard_numel if is_shard else layout.padded_numel) * item_nbytes
        total += _used_numel(master) * item_nbytes
        here += nbytes
        on_host += nbytes * master.is_on_host
    return StateShare("gradients", total, here, on_host)


def _optimizer_share(
    engine: ZeroEngine, optimizers: Sequence[Optimizer]
) -> tuple[StateShare, tuple[str, ...]]:
    """fp32 masters, and what the optimizers keep for each element; who cannot be told."""
    table = engine.table
    copies = [master for master in table.masters if master.is_apart]
    total: float = sum(_used_numel(m) * m.tensor.element_size() for m in copies)
    here: float = sum(m.tensor.nbytes for m in copies)
    on_host: float = sum(m.tensor.nbytes for m in copies if m.is_on_host)
    unknown: dict[str, None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            trials: dict[torch.dtype, float | None] = {}
            for parameter in group["params"]:
                master, piece = table.master_of(parameter), table.piece(parameter)
                if master is None:
                    continue
                dtype = master.tensor.dtype
                if dtype not in trials:
                    trials[dtype] = state_nbytes_per_element(optimizer, group, dtype)
                per_element = trials[dtype]
                if per_element is None:
                    unknown[type(optimizer).__name__] = None
                    continue
                total += per_element * parameter.numel()
                nbytes = per_element * (0 if piece is None else piece.piece.numel)
                here += nbytes
                on_host += nbytes * master.is_on_host
    return StateShare("optimizer", total, here, on_host), tuple(unknown)


def _used_numel(master: MasterShard) -> int:
    """Elements of a bucket's parameters, without padding."""
    return sum(slot.numel for slot in master.parameters.layout.slots)
