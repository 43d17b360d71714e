"""Where the states of each bucket live: on the device, in host memory, or in files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm import Collectives
from lightning_zero.comm.agreed import failing_together
from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.homes import HostHome
from lightning_zero.memory.link import HostLink, Staging, make_link
from lightning_zero.memory.streams import ReadAhead, StateStream
from lightning_zero.optim.apart import steps_apart
from lightning_zero.optim.geometry import elementwise_states
from lightning_zero.optim.masters import HostMaster, MasterShard
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.optim.streamed import StreamedMaster
from lightning_zero.optim.superoffload import (
    HostSteps,
    SuperMaster,
    SuperOffloadUpdater,
    check_super_offload,
)
from lightning_zero.optim.updaters import TOLD, HostUpdater, Updater
from lightning_zero.optim.workers import BesideWorker
from lightning_zero.optim.zenflow import ZenFlowMaster, ZenFlowUpdater, check_zenflow
from lightning_zero.optim.zenflow.home import PickingHome
from lightning_zero.optim.zenflow.rest import RestSteps, WorkerSteps
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.params.shard_homes import FileShard, HostShard, MakeHome, ShardHome
from lightning_zero.plan.offload import OffloadConfig, OffloadPlan, hosted
from lightning_zero.worker import HostWorker


class Places:
    """Makes the states of buckets where they are to live.

    Args:
        plan: What leaves the device.
        device: The device.
        has_copies: Keep fp32 copies of shards of lower precision.
        wire_dtype: Dtype in which gradients travel; None for that of the parameters.
        control: Group over which ranks agree that all of them could make their files.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        device: torch.device,
        has_copies: bool,
        wire_dtype: torch.dtype | None,
        control: Collectives,
    ) -> None:
        self._plan = plan
        self._has_copies = has_copies
        self._wire_dtype = wire_dtype
        self._control = control
        self._states: StateStream | None = None
        self._shards: StateStream | None = None
        self._beside: BesideWorker | None = None
        self._rest: RestSteps | None = None
        self._ahead: HostSteps | None = None
        self.link: HostLink | None = None
        """The way to host memory; None where nothing leaves the device."""
        if plan.optimizer is None:
            return
        self.link = make_link(device, plan.optimizer.pin_memory)
        self._staging = Staging(self.link)
        if plan.optimizer.device == "nvme":
            self._states = self._stream(plan.optimizer, "states")
        if plan.parameters is not None and plan.parameters.device == "nvme":
            self._shards = self._stream(plan.parameters, "parameters")
            self._reads = ReadAhead(self._shards, plan.parameters.buffer_count)

    def _stream(self, config: OffloadConfig, name: str) -> StateStream:
        how = config.buffer_count, config.pin_memory
        return StateStream(config.folder, self._control.rank, name, *how)

    @property
    def make_home(self) -> MakeHome | None:
        """Makes the places of shards of parameters that come and go; None for the device."""
        return self._home_of if self._plan.parameters is not None else None

    def _home_of(self, shard: Tensor) -> ShardHome:
        if self.link is None:
            raise AssertionError("parameters are offloaded without a link")
        if self._shards is None:
            return HostShard(shard, self.link)
        with failing_together(self._control, "write parameters", TOLD):
            return FileShard(shard, self.link, self._reads)

    def masters(
        self, buckets: Sequence[ParameterBucket], optimizers: Sequence[Optimizer]
    ) -> list[MasterShard]:
        """States of buckets that are trained, gradients included.

        Args:
            buckets: In model order, the same on all ranks.
            optimizers: Those that step them.

        Raises:
            ValueError: States of an optimizer cannot be streamed.
            RuntimeError: A rank cannot make its files; on all ranks.
        """
        self._begin_ahead(optimizers)
        on_host = [False] * len(buckets)
        if self._plan.optimizer is not None:
            numels = [bucket.layout.padded_numel for bucket in buckets]
            on_host = hosted(numels, self._plan.optimizer.ratio)
        pairs = list(zip(buckets, on_host, strict=True))
        if self._plan.zenflow is not None:
            check_zenflow(optimizers)
        if self._states is None:
            return [self._master(*pair, optimizers) for pair in pairs]
        check_streamed(optimizers)
        with failing_together(self._control, "write states", TOLD):
            return [self._master(*pair, optimizers) for pair in pairs]

    def _master(
        self, bucket: ParameterBucket, is_on_host: bool, optimizers: Sequence[Optimizer]
    ) -> MasterShard:
        wire_dtype = self._wire_dtype or bucket.dtype
        place = bucket.layout, bucket.parameters, bucket.rank
        if self.link is None or not is_on_host:
            return MasterShard(bucket, GradientBucket(*place, wire_dtype), self._has_copies)
        stepped = torch.promote_types(bucket.dtype, torch.float32)
        keeps_factors = torch.promote_types(wire_dtype, bucket.dtype) == stepped
        if self._ahead is not None:
            home = HostHome(self.link, keeps_factors, self._ahead.zeros)
            gradients = GradientBucket(*place, wire_dtype, home)
            return SuperMaster(bucket, gradients, home, self.link, self._staging, self._ahead)
        if self._plan.zenflow is not None:
            picking = PickingHome(self.link, keeps_factors)
            place_of = picking, self.link, self._staging, self._plan.zenflow, self._rest_steps()
            return ZenFlowMaster(bucket, GradientBucket(*place, wire_dtype, picking), *place_of)
        home = HostHome(self.link, keeps_factors)
        gradients = GradientBucket(*place, wire_dtype, home)
        if self._states is None:
            return HostMaster(bucket, gradients, home, self.link, self._staging)
        states = states_of(bucket, optimizers)
        where = self.link, self._staging, self._states
        return StreamedMaster(bucket, gradients, home, *where, states)

    def _rest_steps(self) -> RestSteps:
        """Who steps what is not important, the same for all buckets."""
        flow = self._plan.zenflow
        if self.link is None or flow is None or self._plan.optimizer is None:
            raise AssertionError("zenflow without states in host memory")
        if self._rest is None and flow.overlap_step:
            worker = self._worker("zenflow", 1.0 - flow.pt_reserved_cores_perc)
            self._rest = WorkerSteps(self.link, worker)
        elif self._rest is None:
            self._rest = RestSteps(self.link)
        return self._rest

    def _begin_ahead(self, optimizers: Sequence[Optimizer]) -> None:
        """Start the worker that steps during backward; an evaluation has none."""
        config = self._plan.optimizer
        if config is None or not config.super_offload or not optimizers:
            return
        check_super_offload(optimizers)
        if self._ahead is None:
            self._ahead = HostSteps(self._worker("super_offload", config.worker_share))

    def _worker(self, name: str, share: float) -> HostWorker:
        if self.link is None or self._plan.optimizer is None or self._beside is not None:
            raise AssertionError("a worker has states in host memory, and is the only one")
        is_pinned = self._plan.optimizer.pin_memory and not self.link.is_within_memory
        self._beside = BesideWorker(name, share, is_pinned, self._control)
        return self._beside.worker

    def updater(self, table: PieceTable) -> Updater:
        """Who steps what has been made here."""
        if self.link is None:
            return Updater(table)
        if self._plan.zenflow is not None:
            return ZenFlowUpdater(table, self._plan.zenflow, self._control)
        if self._ahead is not None:
            return SuperOffloadUpdater(table, self._ahead, self._control)
        if self._states is None and self._shards is None:
            return HostUpdater(table)
        return HostUpdater(table, self._states, self._control)

    def close(self) -> None:
        """Remove files. States that are mapped from them stay valid."""
        for stream in (self._states, self._shards):
            if stream is not None:
                stream.close()
        if self._beside is not None:
            self._beside.close()


def check_streamed(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose states cannot be streamed.

    Raises:
        ValueError: There is one.
    """
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not steps_apart(optimizer):
            raise ValueError(
                f"offload_optimizer='nvme' steps bucket by bucket, but {kind} has to step all"
                " parameters at once. Use 'cpu', or another optimizer."
            )
        for group in optimizer.param_groups:
            if elementwise_states(optimizer, group, torch.float32) is None:
                raise ValueError(
                    f"offload_optimizer='nvme' streams states with one entry for each element, but"
                    f" {kind} keeps states of other shapes. Use 'cpu', or another optimizer."
                )


def states_of(bucket: ParameterBucket, optimizers: Sequence[Optimizer]) -> dict[str, torch.dtype]:
    """States that optimizers are going to have for each element of a bucket, by a trial."""
    members = set(bucket.parameters)
    dtype = torch.promote_types(bucket.dtype, torch.float32)
    found: dict[str, torch.dtype] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not members.isdisjoint(group["params"]):
                found.update(elementwise_states(optimizer, group, dtype) or {})
    return found
