"""The master of a bucket whose important columns are on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.homes import HostHome
from lightning_zero.memory.link import HostLink, Staging
from lightning_zero.optim.masters import HostMaster, shard_in_memory
from lightning_zero.optim.pieces import MasterPiece
from lightning_zero.optim.zenflow.columns import AdamOptions
from lightning_zero.optim.zenflow.part import Part
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.plan.zenflow import ZenFlowConfig


class ZenFlowMaster(HostMaster):
    """A master on the host, of which important columns are on the device.

    See [Note: who has the last word] in ``part.py``.

    Args:
        parameters: Bucket of the parameters.
        gradients: The same bucket's gradients, in host memory.
        home: Where those gradients are.
        link: The way between the device and the host.
        staging: Host memory for values on their way to the device.
        config: Options.
    """

    def __init__(
        self,
        parameters: ParameterBucket,
        gradients: GradientBucket,
        home: HostHome,
        link: HostLink,
        staging: Staging,
        config: ZenFlowConfig,
    ) -> None:
        self._config = config
        self._parts: dict[MasterPiece, Part] = {}
        super().__init__(parameters, gradients, home, link, staging)
        self._known_version = self.tensor._version
        self.clock_state: list[int] = []
        """Of the optimizer's clock, as it is saved."""

    @property
    def is_apart(self) -> bool:
        """See the base class; what is stepped is not what the model sees."""
        return True

    def part(self, piece: MasterPiece) -> Part:
        """What is known of one of its pieces."""
        if piece not in self._parts:
            self._parts[piece] = Part(piece, self._link, self._config.offload)
        return self._parts[piece]

    @property
    def parts(self) -> Sequence[Part]:
        """Of pieces that have been stepped."""
        return list(self._parts.values())

    def adopt(self, optimizer: Optimizer, pieces: Sequence[MasterPiece]) -> None:
        """Follow states that somebody has put into the optimizer, which names pieces now.

        Args:
            optimizer: The user's optimizer.
            pieces: Those of this bucket that it steps.
        """
        is_new = self.is_newer_on_host
        for piece in pieces:
            state = optimizer.state.get(piece.tensor)
            if state:
                self.part(piece).adopt(state, is_new)
                self.part(piece).untell()
            else:
                self._parts.pop(piece, None)  # it was stepped before, and its states were cleared
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
        if self.is_newer_on_host:
            return  # somebody has written to it after the last time
        for part in self._parts.values():
            part.tell(self.clock_state)
        self.note()

    def follow_shard(self) -> None:
        """See the base class."""
        self.bring_together()
        super().follow_shard()

    def release(self) -> None:
        """See the base class; everything has been brought together."""
        self._parts.clear()
        super().release()

    def on_device(self) -> list[Tensor]:
        """See the base class."""
        return [tensor for part in self._parts.values() for tensor in part.on_device()]

    def step_rest(self, options: Mapping[MasterPiece, AdamOptions], has_waited: bool) -> None:
        """Step what is not important, and bring the new values to the parameters' shard.

        Args:
            options: Of each piece that is to be stepped.
            has_waited: By the gradients that wait, else by those of this step.
        """
        if not options:
            return
        self.settle()
        copy = self.room_for_copy()
        is_whole = len(options) == len(self.gradients.pieces)
        room = copy if is_whole or copy is self.parameters.shard else None
        for piece, of_piece in options.items():
            begin = piece.piece.shard_offset
            part_copy = None if room is None else room[begin : begin + piece.piece.numel]
            self.part(piece).step_rest(of_piece, part_copy, has_waited)
        self.store(copy, is_copied=room is not None)
        if self._stored is not None:
            self._stored.wait()

    def show_important(self) -> None:
        """Write the important columns of all parts into the parameters' shard."""
        here = shard_in_memory(self.parameters, self._link)
        shard = self.parameters.shard if here is None else here
        with torch.no_grad():
            for part in self._parts.values():
                part.show(shard)
