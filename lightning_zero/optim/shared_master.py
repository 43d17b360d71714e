"""A master in memory that somebody else steps as well."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.homes import HostHome, Memory
from lightning_zero.memory.link import HostLink, Staging
from lightning_zero.optim.masters import HostMaster, shard_in_memory
from lightning_zero.params.bucket import ParameterBucket


class SharedMaster(HostMaster):
    """A master apart from what the model sees, with its copy in the dtype of the parameters.

    Args:
        parameters: Bucket of the parameters.
        gradients: The same bucket's gradients, on the host, too.
        home: Where those gradients are.
        link: The way between the device and the host.
        staging: Host memory for values on their way to the device.
        memory: Gives the memory of both.
    """

    def __init__(
        self,
        parameters: ParameterBucket,
        gradients: GradientBucket,
        home: HostHome,
        link: HostLink,
        staging: Staging,
        memory: Memory,
    ) -> None:
        self._memory = memory
        super().__init__(parameters, gradients, home, link, staging)
        self._copy: Tensor | None = None
        """The master in the dtype of the parameters; None where that is its own."""
        if self.has_copy:
            self._copy = memory(self.tensor.numel(), parameters.dtype).copy_(self.tensor)

    def _make(self) -> Tensor:
        shard = self.parameters.shard
        master = self._memory(shard.numel(), torch.float32)
        self._link.to_host(shard, master).wait_on_host()
        return master

    @property
    def is_apart(self) -> bool:
        """See the base class; what is stepped is not what the model sees."""
        return True

    def _send_all(self) -> None:
        """Bring master or copy to the parameters' shard; may be under way when this returns."""
        values = self.tensor if self._copy is None else self._copy
        here = shard_in_memory(self.parameters, self._link)
        if here is not None:
            here.copy_(values)
        else:
            self._stored = self._link.to_device(values, self.parameters.shard)
