"""The master of a bucket whose important columns are on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.memory.link import HostLink, Staging
from lightning_zero.optim.masters import shard_in_memory
from lightning_zero.optim.pieces import MasterPiece
from lightning_zero.optim.shared_master import SharedMaster
from lightning_zero.optim.zenflow.home import PickingHome
from lightning_zero.optim.zenflow.part import Part
from lightning_zero.optim.zenflow.rest import RestSteps
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.plan.zenflow import ZenFlowConfig
from lightning_zero.worker.jobs import AdamOptions


class ZenFlowMaster(SharedMaster):
    """A master on the host, of which important columns are on the device.

    See [Note: who has the last word] in ``part.py``. Where the rest is stepped in a worker, its new
    values are *late*: they wait in the master until the next window ends.

    Args:
        parameters: Bucket of the parameters.
        gradients: The same bucket's gradients, in host memory.
        home: Where those gradients are.
        link: The way between the device and the host.
        staging: Host memory for values on their way to the device.
        config: Options.
        steps: Who steps the rest.
    """

    def __init__(
        self,
        parameters: ParameterBucket,
        gradients: GradientBucket,
        home: PickingHome,
        link: HostLink,
        staging: Staging,
        config: ZenFlowConfig,
        steps: RestSteps,
    ) -> None:
        self._config = config
        self._steps = steps
        self._picking = home
        self._parts: dict[MasterPiece, Part] = {}
        super().__init__(parameters, gradients, home, link, staging, steps.zeros)
        self._known_version = self.tensor._version
        self.clock_state: list[int] = []
        """Of the optimizer's clock, as it is saved."""
        self.is_late = False
        """The rest has been stepped, or is being stepped, and nobody has been shown."""
        self._told_late: bool | None = None
        """What was told of that when all was brought together; None for stepped since."""

    def part(self, piece: MasterPiece) -> Part:
        """What is known of one of its pieces."""
        if piece not in self._parts:
            place = self._picking, self._link, self._steps
            self._parts[piece] = Part(piece, *place, self._config.offload)
        return self._parts[piece]

    def adopt(self, optimizer: Optimizer, pieces: Sequence[MasterPiece]) -> None:
        """Follow states that somebody has put into the optimizer, which names pieces now.

        Args:
            optimizer: The user's optimizer.
            pieces: Those of this bucket that it steps.
        """
        is_new = self.is_newer_on_host
        self._told_late = None
        for piece in pieces:
            state = optimizer.state.get(piece.tensor)
            if not state:
                self._parts.pop(piece, None)  # it was stepped before, and its states were cleared
                continue
            part = self.part(piece)
            part.adopt(state, is_new)
            part.untell()
            self.is_late |= part.takes_late_values()
        if self._copy is not None and (is_new or self.is_late and self.is_newer_on_host):
            self._copy.copy_(self.tensor)
        self.note()

    def note(self) -> None:
        """Whatever was written to the master up to now was written here."""
        self._known_version = self.tensor._version

    @property
    def is_newer_on_host(self) -> bool:
        """Whether somebody has written to the master since it was last noted."""
        return self.tensor._version != self._known_version

    def bring_together(self) -> None:
        """See the base class."""
        if self.is_newer_on_host or self._told_late == self.is_late:
            return  # somebody has written to it, or nobody has stepped, after the last time
        self._steps.finish()
        for part in self._parts.values():
            part.tell(self.clock_state, self.is_late)
        self._told_late = self.is_late
        self.note()

    def follow_shard(self) -> None:
        """See the base class. Late values of the rest give way to what was written."""
        self.bring_together()
        super().follow_shard()
        self.is_late = False

    def release(self) -> None:
        """See the base class; everything has been brought together."""
        self._parts.clear()
        super().release()

    def on_device(self) -> list[Tensor]:
        """See the base class."""
        return [tensor for part in self._parts.values() for tensor in part.on_device()]

    def begin_rest(self, options: Mapping[MasterPiece, AdamOptions], has_waited: bool) -> None:
        """Begin to step what is not important; :meth:`show_rest` ends it.

        Args:
            options: Of each piece that is to be stepped.
            has_waited: By the gradients that wait, else by those of this step.
        """
        if not options:
            return
        self.settle()
        for piece, of_piece in options.items():
            begin = piece.piece.shard_offset
            copy = None
            if self._copy is not None:
                copy = self._copy[begin : begin + piece.piece.numel]
            self.part(piece).step_rest(of_piece, copy, has_waited)
        self.is_late = True

    def finish_rest(self) -> None:
        """Wait for what has begun.

        Raises:
            RuntimeError: It has failed.
        """
        self._steps.finish()

    def show_rest(self) -> None:
        """Bring values that are late to the parameters' shard."""
        if not self.is_late:
            return
        self.finish_rest()
        self.is_late = False
        self._send_all()
        if self._stored is not None:
            self._stored.wait()

    def show_important(self) -> None:
        """Write the important columns of all parts into the parameters' shard."""
        here = shard_in_memory(self.parameters, self._link)
        shard = self.parameters.shard if here is None else here
        with torch.no_grad():
            for part in self._parts.values():
                part.show(shard)
