"""Where the states of each bucket live: on the device, or on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.homes import HostHome
from lightning_zero.memory.link import HostLink, Staging, make_link
from lightning_zero.optim.masters import HostMaster, MasterShard
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.optim.updaters import HostUpdater, Updater, WholeUpdater
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.plan.offload import OffloadPlan, hosted


class Places:
    """Makes the states of buckets where they are to live.

    Args:
        plan: What leaves the device.
        device: The device.
        has_copies: Keep fp32 copies of shards of lower precision.
        wire_dtype: Dtype in which gradients travel; None for that of the parameters.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        device: torch.device,
        has_copies: bool,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._plan = plan
        self._has_copies = has_copies
        self._wire_dtype = wire_dtype
        self.link: HostLink | None = None
        """The way to host memory; None where nothing leaves the device."""
        self.host_ratio = 0.0
        """Share of trained elements that is stepped on the host."""
        if plan.optimizer is not None:
            self.link = make_link(device, plan.optimizer.pin_memory)
            self._staging = Staging(self.link)

    @property
    def parameter_link(self) -> HostLink | None:
        """The way to host memory for shards of parameters that come and go."""
        return self.link if self._plan.parameters is not None else None

    def masters(self, buckets: Sequence[ParameterBucket]) -> list[MasterShard]:
        """States of buckets that are trained, gradients included.

        Args:
            buckets: In model order, the same on all ranks.
        """
        on_host = [False] * len(buckets)
        if self._plan.optimizer is not None:
            numels = [bucket.layout.padded_numel for bucket in buckets]
            on_host = hosted(numels, self._plan.optimizer.ratio)
            here = sum(n for n, is_here in zip(numels, on_host, strict=True) if is_here)
            self.host_ratio = here / max(sum(numels), 1)
        return [self._master(*pair) for pair in zip(buckets, on_host, strict=True)]

    def _master(self, bucket: ParameterBucket, is_on_host: bool) -> MasterShard:
        wire_dtype = self._wire_dtype or bucket.dtype
        place = bucket.layout, bucket.parameters, bucket.rank
        if self.link is None or not is_on_host:
            return MasterShard(bucket, GradientBucket(*place, wire_dtype), self._has_copies)
        home = HostHome(self.link)
        gradients = GradientBucket(*place, wire_dtype, home)
        return HostMaster(bucket, gradients, home, self.link, self._staging)

    def updater(self, table: PieceTable) -> Updater:
        """Who steps what has been made here."""
        return WholeUpdater(table) if self.link is None else HostUpdater(table)
