"""Masters and optimizer states in a file, in memory only while their bucket is stepped.

[Note: states in a file]
A bucket has one region of a file: its master and, one after the other, the optimizer's states that
have an entry for each element. A step passes through the regions of all buckets in order. Between
steps ``optimizer.state`` names mappings of the file, so whoever saves, shows or compares states
finds tensors. What others put there instead (a checkpoint that was loaded) is taken into the file
by the next step. States of other shapes stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.homes import HostHome
from lightning_zero.memory.link import HostLink, Staging
from lightning_zero.memory.streams import Sections, StateStream
from lightning_zero.optim.apart import ApartSteps
from lightning_zero.optim.bucket_steps import Bound, Group, step_on_host
from lightning_zero.optim.masters import HostMaster
from lightning_zero.optim.pieces import MasterPiece
from lightning_zero.params.bucket import ParameterBucket

MASTER = "master"
"""Name of the master's section."""


class StreamedMaster(HostMaster):
    """A master in a file, see [Note: states in a file]. ``tensor`` is a mapping of it.

    Args:
        parameters: Bucket of the parameters.
        gradients: The same bucket's gradients, in host memory.
        home: Where those gradients are.
        link: The way between the device and the host.
        staging: Host memory for values on their way to the device.
        stream: The file.
        states: Names and dtypes of the states that its optimizers keep for each element.
    """

    is_in_memory = False

    def __init__(
        self,
        parameters: ParameterBucket,
        gradients: GradientBucket,
        home: HostHome,
        link: HostLink,
        staging: Staging,
        stream: StateStream,
        states: Mapping[str, torch.dtype],
    ) -> None:
        self._stream = stream
        self._states = dict(states)
        super().__init__(parameters, gradients, home, link, staging)
        self._seen_version = self.tensor._version

    @property
    def is_apart(self) -> bool:
        """See the base class."""
        return True

    def _make(self) -> Tensor:
        shard = self.parameters.shard
        dtype = torch.promote_types(shard.dtype, torch.float32)
        self._sections = Sections(shard.numel(), {MASTER: dtype, **self._states})
        self.index = self._stream.add(self._sections.nbytes)
        self._region = self._stream.mapped(self.index)
        # Nothing but the first section is written: space that was reserved reads as zeros.
        self._stream.window.write(self.index, shard.to("cpu", dtype))
        return self._sections.view(self._region, MASTER)

    @property
    def is_dirty(self) -> bool:
        """Whether the master was written to by way of its mapping."""
        return self.tensor._version != self._seen_version

    def room_for_copy(self) -> Tensor:
        """See the base class; the master itself is in memory for a moment only."""
        return self._room()

    def room_for_state(self, key: str, dtype: torch.dtype) -> Tensor | None:
        """See the base class."""
        if self._sections.dtypes.get(key) != dtype:
            return None
        self._seen_version = -1
        return self._sections.view(self._region, key)

    def step(
        self,
        optimizer: Optimizer,
        apart: ApartSteps,
        groups: Sequence[Group],
        region: Tensor,
    ) -> None:
        """Step pieces in memory, and send the new values on their way.

        Args:
            optimizer: The user's optimizer, which names pieces now.
            apart: Its twin.
            groups: What is to be stepped.
            region: The bytes of the file's region, to be written back afterwards.
        """
        values = self._sections.view(region, MASTER)
        bounds = [[self._bind(optimizer, piece, region) for piece in g.pieces] for g in groups]
        copy = self.room_for_copy()
        if not step_on_host(optimizer, apart, self, groups, bounds, copy):
            copy.copy_(values)
        self.send(copy)
        for bound in (bound for of_group in bounds for bound in of_group):
            self._keep(optimizer, bound, region)
        self._seen_version = self.tensor._version

    def _bind(self, optimizer: Optimizer, piece: MasterPiece, region: Tensor) -> Bound:
        """A piece in the memory of a region, with its states."""
        state: dict[str, Any] = {}
        for key, value in optimizer.state.get(piece.tensor, {}).items():
            if not self._has_section(piece, key, value):
                state[key] = value
                continue
            state[key] = piece.view(self._sections.view(region, key))
            if not self._is_mapped(piece, key, value):  # it was put there by others
                state[key].copy_(value)
        return Bound(piece, piece.view(self._sections.view(region, MASTER)), state)

    def _keep(self, optimizer: Optimizer, bound: Bound, region: Tensor) -> None:
        """Write new states into the region, and name their mappings in the optimizer."""
        piece = bound.piece
        kept: dict[str, Any] = {}
        for key, value in bound.state.items():
            kept[key] = value
            self._check_has_room(optimizer, piece, key, value)
            if self._has_section(piece, key, value):
                there = piece.view(self._sections.view(region, key))
                if there.data_ptr() != value.data_ptr():
                    there.copy_(value)
                kept[key] = piece.view(self._sections.view(self._region, key))
        if kept:
            optimizer.state[piece.tensor] = kept
        else:
            optimizer.state.pop(piece.tensor, None)

    def _check_has_room(
        self, optimizer: Optimizer, piece: MasterPiece, key: str, value: Any
    ) -> None:
        """States that were not foreseen would fill the memory, step by step."""
        is_state = isinstance(value, Tensor) and value.dim() > 0
        if is_state and not self._has_section(piece, key, value):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps {key!r} of {self.parameters}, of shape"
                f" {tuple(value.shape)} and {value.dtype}, for which the file has no room: it has"
                f" {list(self._states)}, as the optimizers had when training was set up. Give the"
                " Trainer this optimizer, with these options, from the beginning."
            )

    def _has_section(self, piece: MasterPiece, key: str, value: Any) -> bool:
        is_state = isinstance(value, Tensor) and value.shape == piece.tensor.shape
        return is_state and self._sections.dtypes.get(key) == value.dtype

    def _is_mapped(self, piece: MasterPiece, key: str, value: Tensor) -> bool:
        mapped = piece.view(self._sections.view(self._region, key))
        return mapped.data_ptr() == value.data_ptr()
