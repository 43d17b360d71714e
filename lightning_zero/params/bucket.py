"""One bucket of parameters: flat storage, state, and what users see while it is away.

[Note: true shapes always]
While the full tensor of a bucket is not there, or not whole, ``param.data`` is one NaN expanded to
the true shape: shapes and counts are right at any time, and a read that slipped past the engine
gives NaN, never a plausible number. Every parameter has a NaN of its own, so that an alias of it
(``detach()`` in a state dict) still tells which parameter it stands for.

[Note: aliases]
Somebody may hold a view of the full tensor beyond its time: ``model.weight.detach()`` in a list, or
a module that returns a view of its weight. Freed memory under it would end the process. So a bucket
counts the users of its storage; one that somebody else holds is left to them, with the values of
that time, and the bucket goes on with a new one.
What is recomputed in backward holds parameters themselves, which are no views: in local variables,
in the graph of a reentrant checkpoint, and (frozen ones) among what another checkpoint has
recomputed. So references to parameters are counted, too.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor, nn

from lightning_zero import _compat
from lightning_zero.comm.api import Gathers, Handle
from lightning_zero.params.shard_homes import MakeHome, ShardHome
from lightning_zero.params.values import WHOLE, Values
from lightning_zero.plan.layout import BucketLayout, Piece


class ParamStatus(enum.Enum):
    """State of a bucket, and so of its parameters."""

    NOT_AVAILABLE = "not available"
    """Only the shard is in memory; parameters read as NaN."""

    INFLIGHT = "in flight"
    """The full tensor is being filled by an all-gather; parameters read as NaN."""

    AVAILABLE = "available"
    """The full tensor is whole, and parameters are views of it."""


LEGAL_TRANSITIONS = {
    ParamStatus.NOT_AVAILABLE: {ParamStatus.INFLIGHT},
    ParamStatus.INFLIGHT: {ParamStatus.AVAILABLE},
    ParamStatus.AVAILABLE: {ParamStatus.NOT_AVAILABLE, ParamStatus.INFLIGHT},
}


class ParameterBucket:
    """Parameters of one bucket in one flat tensor, whole or as this rank's shard.

    A *resident* bucket (stages 0 to 2) keeps its flat tensor; the shard is a view of it. The flat
    storage of any other bucket exists only while the bucket is in use; at first it is not there.

    Args:
        layout: Plan of the bucket.
        parameters: The parameters of ``layout.slots``, all of one dtype and device. They become
            views of the bucket, and their own memory is freed.
        gathers: Brings the shards together.
        is_resident: Keep the full tensor between uses.
        values: Where the parameters' initial values are.
        make_home: Makes the place where the shard of a bucket that comes and goes lives, if that is
            not on the device.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        gathers: Gathers,
        is_resident: bool,
        values: Values = WHOLE,
        make_home: MakeHome | None = None,
    ) -> None:
        first = parameters[0]
        self.layout = layout
        self.parameters = list(parameters)
        self.is_resident = is_resident
        self.home: ShardHome | None = None
        """Where the shard lives, if not on the device."""
        self._gathers = gathers
        self._handle: Handle | None = None
        self._shown: list[Tensor] = []
        self._versions: list[int] = []
        self.times_kept = 0
        """How often what a user wrote to parameters was taken as their values."""
        self.revision = 0
        """Counts changes of the shard, but for those of which nobody is told (``param.data``)."""
        self.status = ParamStatus.AVAILABLE if is_resident else ParamStatus.NOT_AVAILABLE
        with torch.no_grad():
            self._own = slice(*layout.shard_range(gathers.rank % layout.world_size))
            begin, end = (0, layout.padded_numel) if is_resident else layout.shard_range(self.rank)
            taken = values.take(layout.slots, self.parameters, begin, end)
            self._blanks = blanks(len(layout.slots), first)
            self._placeholders = [
                self._blanks[slot].expand(parameter.shape)
                for slot, parameter in enumerate(self.parameters)
            ]
            self._blank_value = self._blanks[:1].clone()
            self._show(self._placeholders)  # frees what the parameters had, before more is taken
            self.flat = taken if is_resident else taken.new_empty(layout.padded_numel)
            if make_home is not None and not is_resident:
                self.home = make_home(taken)
                taken = self.home.shard
            self.shard = self.flat[self._own] if is_resident else taken
        self._views = _views_of(self.flat, self.layout)
        self._own_users = _compat.storage_users(self.flat)
        self._idle_references: list[int] = []
        self._flat_nbytes = self.flat.untyped_storage().nbytes()
        if is_resident:
            self._show(self._views)
        else:
            self.flat.untyped_storage().resize_(0)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.flat.dtype

    @property
    def rank(self) -> int:
        """Index of this rank's shard."""
        return self._own.start // self.layout.shard_numel

    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of this rank."""
        return self.layout.pieces(self.rank)

    def placeholder_pointers(self) -> list[int]:
        """Addresses of the NaNs that stand for the parameters, in order of the slots."""
        return [placeholder.data_ptr() for placeholder in self._placeholders]

    def storage_key(self) -> int:
        """Identity of the flat storage, the same over reshards unless somebody holds an alias."""
        return _compat.storage_identity(self.flat)

    def begin_unshard(self, key: int) -> None:
        """Start to make the full tensor from the shards of all ranks.

        Args:
            key: Key of the transfer, the same on all ranks.

        Raises:
            RuntimeError: The bucket is already in flight.
        """
        if self.status is ParamStatus.NOT_AVAILABLE:
            self.check_untouched()
        self._move_to(ParamStatus.INFLIGHT)
        self._show(self._placeholders)
        if not self.is_resident:
            self.flat.untyped_storage().resize_(self._flat_nbytes)
            self._own_users = _compat.storage_users(self.flat)
            self._begin_own()
        shard = self.flat[self._own] if self.home is not None else self.shard
        try:
            self._handle = self._gathers.all_gather(self.flat, shard, key)
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self, timeout: timedelta | None = None) -> None:
        """Finish an unshard in flight; nothing to do if the bucket is available.

        Raises:
            RuntimeError: The bucket is neither in flight nor available.
        """
        if self.status is ParamStatus.AVAILABLE:
            return
        if self._handle is None:
            raise RuntimeError(f"{self}: wait() while {self.status.value}")
        try:
            self._handle.wait(timeout)
        except RuntimeError as error:
            raise self._failed(error) from error
        if self.home is not None and not self._gathers.needs_own:
            self.home.bring(self.flat[self._own])
        self._handle = None
        self.check_untouched()
        self._move_to(ParamStatus.AVAILABLE)
        self._show(self._views)

    def _begin_own(self) -> None:
        """Start to write this rank's shard into its part of the full tensor."""
        own = self.flat[self._own]
        if self.home is None:
            with torch.no_grad():
                own.copy_(self.shard)
            return
        self.home.begin(own)
        if self._gathers.needs_own:
            self.home.bring(own)

    def _failed(self, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"rank {self._gathers.rank} could not gather {self}: another rank has failed, or did"
            f" not take part in time ({type(error).__name__}: {error})"
        )

    def reshard(self) -> None:
        """Give the full tensor back and keep the shard.

        Raises:
            RuntimeError: The bucket is not available.
        """
        self._move_to(ParamStatus.NOT_AVAILABLE)
        self._show(self._placeholders)
        if _compat.storage_users(self.flat) > self._own_users:
            with torch.inference_mode(False):  # what evaluation makes could never be trained
                self.flat = torch.empty_like(self.flat)  # see [Note: aliases]
                self._views = _views_of(self.flat, self.layout)
        self.flat.untyped_storage().resize_(0)

    def is_aliased(self) -> bool:
        """Whether somebody holds a view of the full tensor, or a graph a parameter itself.

        See [Note: aliases].
        """
        shown_users = len(self.parameters) if self._shown is self._views else 0
        if _compat.storage_users(self.flat) > self._own_users + shown_users:
            return True
        # Python, and the node that accumulates its gradient, hold a parameter at any time.
        return any(_compat.tensor_users(p) > 1 + p.requires_grad for p in self.parameters)

    @property
    def is_referred(self) -> bool:
        """Whether there are more references to a parameter than between passes."""
        found = self._references()
        return any(now > idle for now, idle in zip(found, self._idle_references, strict=False))

    def note_references(self) -> None:
        """Nothing is running: whoever refers to a parameter now does so at any time."""
        self._idle_references = self._references()

    def _references(self) -> list[int]:
        return [sys.getrefcount(parameter) for parameter in self.parameters]

    def note_update(self) -> None:
        """The shard has new values: a graph that has saved the old ones must not go on with them.

        Autograd compares versions of parameters, and the update went past them.
        """
        self.revision += 1
        if self.home is not None:
            self.home.note_change()
        for parameter in self.parameters:
            torch.autograd.graph.increment_version(parameter)
        self._versions = [parameter._version for parameter in self.parameters]

    def store_shard(self, shard: Tensor) -> None:
        """Overwrite this rank's shard, after an update that stepped another tensor.

        Args:
            shard: 1-D [S], any floating dtype.
        """
        if self.home is None:
            self.shard.copy_(shard)
        else:
            self.home.put(shard)

    def was_written(self) -> bool:
        """Whether a parameter was changed since it was last brought in or taken away.

        Sees operations in place and an assigned ``param.data``, not operations on ``param.data``.
        """
        return any(
            parameter._version != version or parameter.data_ptr() != shown.data_ptr()
            for parameter, version, shown in zip(
                self.parameters, self._versions, self._shown, strict=True
            )
        )

    def check_untouched(self) -> None:
        """Make sure that nobody has written to parameters that are not there.

        Raises:
            RuntimeError: A write went to a placeholder, and would be lost.
        """
        is_touched = self.was_written()
        if not is_touched and self.flat.device.type == "cpu":  # elsewhere a look costs a stall
            is_same = torch.equal(self._blanks, self._blank_value.expand_as(self._blanks))
            is_touched = not is_same and not self._blanks.isnan().all()
        if is_touched:
            raise RuntimeError(
                f"a parameter of {self} was written to while its full value was not in memory (it"
                " is sharded over the ranks between uses), so the write would be lost. Write inside"
                " `with trainer.strategy.full_params(module, writeback=True):`, or initialize"
                " weights before training starts (in __init__, setup or configure_model)."
            )

    def take_assigned_values(self) -> None:
        """Move what was assigned to ``param.data`` into the full tensor; the shard stays as it is.

        Raises:
            RuntimeError: A parameter was given another shape or dtype.
        """
        for slot, view in enumerate(self._views):
            parameter = self.parameters[slot]
            if parameter.data_ptr() == view.data_ptr():
                continue
            if parameter.shape != view.shape or parameter.dtype != view.dtype:
                raise RuntimeError(
                    f"{self.layout.slots[slot].fqn!r} was replaced by a tensor of shape"
                    f" {tuple(parameter.shape)} and {parameter.dtype} while it is partitioned as"
                    f" {tuple(view.shape)} and {view.dtype}. Convert the model before training."
                )
            view.copy_(parameter.data)
            parameter.data = view

    def keep_written_values(self) -> None:
        """Take what stands in the parameters now as the bucket's values.

        Raises:
            RuntimeError: A parameter was given another shape or dtype.
        """
        self.take_assigned_values()
        self.times_kept += 1
        self.revision += 1
        self._versions = [parameter._version for parameter in self.parameters]
        if not self.is_resident:
            self.store_shard(self.flat[self._own])

    def forget_writes(self, was_written: bool = False) -> None:
        """Take parameters as they were shown, whatever was done to them; for after an error.

        Args:
            was_written: What is shown was written to, and is to be kept when it goes.
        """
        for parameter, shown in zip(self.parameters, self._shown, strict=True):
            if parameter.data_ptr() != shown.data_ptr():
                parameter.data = shown
        self._versions = [-1 if was_written else p._version for p in self.parameters]

    def restore_parameters(self, values: Values = WHOLE) -> None:
        """Give every parameter back; the bucket is dead after.

        Args:
            values: Who holds the parameters' values from now on; by default they are whole.

        Raises:
            RuntimeError: The bucket is not available.
        """
        if self.status is not ParamStatus.AVAILABLE:
            raise RuntimeError(f"{self}: restore_parameters() while {self.status.value}")
        self.keep_written_values()
        self._restore(self.flat, values)

    def restore_from_shard(self) -> None:
        """As :meth:`restore_parameters` in any state, where the shard is all there is.

        Raises:
            RuntimeError: Other ranks hold shards, too, or it cannot be read from its file.
        """
        if self.layout.world_size != 1:
            raise RuntimeError(f"{self}: {self.layout.world_size} ranks hold shards, not one")
        shard = self.shard if self.home is None else self.home.read()
        self._restore(shard.to(self.flat.device))

    def _restore(self, flat: Tensor, values: Values = WHOLE) -> None:
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            view = flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset)
            values.give_back(parameter, view)
        self._views, self._shown = [], []
        self.flat = self.shard = torch.empty(0)

    def _show(self, tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor
        self._shown = tensors
        self._versions = [parameter._version for parameter in self.parameters]

    def _move_to(self, status: ParamStatus) -> None:
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise RuntimeError(f"{self}: cannot go from {self.status.value} to {status.value}")
        self.status = status

    def __str__(self) -> str:
        return str(self.layout)


def _views_of(flat: Tensor, layout: BucketLayout) -> list[Tensor]:
    return [flat.as_strided(slot.shape, slot.stride, slot.offset) for slot in layout.slots]


def is_placeholder(parameter: Tensor) -> bool:
    """Whether a tensor of more than one element is the NaN that stands for a parameter."""
    if isinstance(parameter, nn.UninitializedParameter) or parameter.is_meta:
        return False
    if parameter.layout is not torch.strided or parameter.numel() <= 1:
        return False
    places = zip(parameter.stride(), parameter.shape, strict=True)
    is_one_value = not any(stride for stride, numel in places if numel > 1)
    return is_one_value and bool(parameter.detach().flatten()[:1].isnan().any())


def explain_refused_write(error: BaseException, remedy: str) -> None:
    """Say what torch means where a parameter or a gradient that is not there was written to."""
    if isinstance(error, RuntimeError) and "single memory location" in str(error):
        error.args = (f"{error} {remedy}",)


def blanks(count: int, like: Tensor) -> Tensor:
    """One value per parameter that cannot be taken for a weight: NaN, or the smallest integer."""
    if like.dtype.is_floating_point:
        value = float("nan")
    else:
        value = 0 if like.dtype is torch.bool else torch.iinfo(like.dtype).min
    return torch.full((count,), value, dtype=like.dtype, device=like.device)
