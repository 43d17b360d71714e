"""Whether host memory has room for what is to be offloaded, before any of it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm import ShardGroups
from lightning_zero.config import ZeroOptions
from lightning_zero.memory.room import shortage
from lightning_zero.optim.geometry import state_nbytes_per_element
from lightning_zero.plan.layout import default_bucket_numel
from lightning_zero.plan.offload import OffloadConfig

GIB = 2**30
UNDO_NBYTES = 12
"""Of an element: its master weight and two averages."""
STAGING_BUFFERS = 2
"""Pieces of host memory on the way to the device, and as many for gradients that are added up."""


@dataclass(slots=True)
class HostNeed:
    """Bytes of host memory that one rank is going to take."""

    masters_nbytes: float = 0.0
    """Copies that the optimizer steps."""

    states_nbytes: float = 0.0
    """What the optimizer keeps, or the window through which that is streamed from a file."""

    undo_nbytes: float = 0.0
    """What was there before steps that may have to be taken back."""

    gradients_nbytes: float = 0.0
    parameters_nbytes: float = 0.0
    buffers_nbytes: float = 0.0
    """Memory that copies pass through."""

    @property
    def total_nbytes(self) -> int:
        """Sum of all."""
        return int(
            self.masters_nbytes
            + self.states_nbytes
            + self.undo_nbytes
            + self.gradients_nbytes
            + self.parameters_nbytes
            + self.buffers_nbytes
        )

    def __str__(self) -> str:
        parts = {
            "master weights": self.masters_nbytes,
            "optimizer states": self.states_nbytes,
            "undo records": self.undo_nbytes,
            "gradients": self.gradients_nbytes,
            "parameters": self.parameters_nbytes,
            "buffers": self.buffers_nbytes,
        }
        return ", ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in parts.items() if nbytes)


def check_host_room(
    parameters: Iterable[nn.Parameter],
    optimizers: Sequence[Optimizer],
    options: ZeroOptions,
    groups: ShardGroups,
    device: torch.device,
) -> None:
    """Refuse to offload what does not fit into host memory; for all ranks to call.

    Args:
        parameters: All of the model.
        optimizers: The user's optimizers, not stepped yet.
        options: What is to be offloaded.
        groups: The ranks that share the states.
        device: Where the model is.

    Raises:
        RuntimeError: The ranks of a host would take more than it has; on all ranks.
    """
    if options.offload.optimizer is None:
        return
    need = host_need(parameters, optimizers, options, groups.world_size, device)
    short = shortage(need.total_nbytes, groups.control)
    if short is None:
        return
    who = "one of them" if short.is_limited else f"its {short.ranks} rank(s)"
    limit = " until the limit of a process (ulimit)" if short.is_limited else ""
    raise RuntimeError(
        f"what is offloaded does not fit into the memory of host {short.host!r}: {who} would take"
        f" {short.needed_nbytes / GIB:.2f} GiB, and {short.free_nbytes / GIB:.2f} GiB are free"
        f"{limit}. Rank {groups.rank} would take, in GiB: {need}. Use fewer ranks on a host and"
        " more hosts, offload less (offload_optimizer={'ratio': 0.5}), keep states in files"
        " (offload_optimizer='nvme'), or raise the limit."
    )


def host_need(
    parameters: Iterable[nn.Parameter],
    optimizers: Sequence[Optimizer],
    options: ZeroOptions,
    world_size: int,
    device: torch.device,
) -> HostNeed:
    """Bytes of host memory that one rank is going to take, without the padding of buckets.

    Args:
        parameters: All of the model.
        optimizers: The user's optimizers.
        options: What is to be offloaded.
        world_size: Ranks that share the states.
        device: Where the model is.
    """
    plan = options.offload
    if plan.optimizer is None:
        return HostNeed()
    every = list(parameters)
    total_numel = sum(p.numel() for p in every)
    bucket_numel = options.bucket_numel or default_bucket_numel(total_numel)
    bucket_numel = min(max([bucket_numel, *(p.numel() for p in every)]), max(total_numel, 1))
    share_numel = -(-bucket_numel // world_size)
    per_element = _StateBytes(optimizers)
    keeps_shards = plan.parameters is not None and plan.parameters.device == "cpu"
    pinned = _Pinned(share_numel, plan.optimizer, device)
    flow = plan.zenflow
    sums = 0 if flow is None or flow.update_interval == 1 else 1 + flow.overlap_step
    need = HostNeed()
    for parameter in every:
        numel, dtype = parameter.numel() / world_size, parameter.dtype
        if keeps_shards:
            need.parameters_nbytes += pinned.nbytes(numel, dtype.itemsize)
        if not parameter.requires_grad:
            continue
        stepped_numel = numel * plan.optimizer.ratio
        grad_dtype = torch.promote_types(options.wire_dtype or dtype, dtype)
        if optimizers:
            need.gradients_nbytes += pinned.nbytes(stepped_numel, grad_dtype.itemsize)
            need.gradients_nbytes += pinned.nbytes(stepped_numel, 4) * sums  # that wait
        if plan.optimizer.device == "nvme":
            continue
        if dtype.itemsize < 4:
            need.masters_nbytes += 4 * stepped_numel
        elif not keeps_shards or flow is not None or plan.steps_ahead:
            need.masters_nbytes += pinned.nbytes(stepped_numel, dtype.itemsize)
        need.states_nbytes += per_element.of(parameter) * stepped_numel
        if plan.steps_ahead:
            need.undo_nbytes += UNDO_NBYTES * stepped_numel
            need.buffers_nbytes += dtype.itemsize * stepped_numel * (dtype.itemsize < 4)
    largest_nbytes = max((p.element_size() for p in every), default=4)
    need.buffers_nbytes += 2 * STAGING_BUFFERS * share_numel * largest_nbytes
    if plan.optimizer.device == "nvme":
        bytes_each = 4 + max((per_element.of(p) for p in every if p.requires_grad), default=0.0)
        need.states_nbytes = plan.optimizer.buffer_count * share_numel * bytes_each
    if plan.parameters is not None and plan.parameters.device == "nvme":
        need.buffers_nbytes += plan.parameters.buffer_count * share_numel * largest_nbytes
    return need


class _StateBytes:
    """Bytes of state for each element of a parameter, by one trial of each group and dtype."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._place = {
            parameter: (optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._found: dict[tuple[Optimizer, int, torch.dtype], float] = {}

    def of(self, parameter: nn.Parameter) -> float:
        """0 for one that no optimizer steps, or where a trial does not tell."""
        if parameter not in self._place:
            return 0.0
        optimizer, number = self._place[parameter]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        key = optimizer, number, dtype
        if key not in self._found:
            group = optimizer.param_groups[number]
            self._found[key] = state_nbytes_per_element(optimizer, group, dtype) or 0.0
        return self._found[key]


class _Pinned:
    """Page-locked memory, which torch hands out in powers of two for each bucket."""

    def __init__(self, share_numel: int, config: OffloadConfig, device: torch.device) -> None:
        self._share_numel = share_numel
        self._is_rounded = config.pin_memory and device.type != "cpu"

    def nbytes(self, numel: float, item_nbytes: int) -> float:
        """Bytes of so many elements, in buckets."""
        nbytes = self._share_numel * item_nbytes
        rounding = (1 << (nbytes - 1).bit_length()) / nbytes if self._is_rounded else 1.0
        return numel * item_nbytes * rounding
