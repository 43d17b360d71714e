"""The gradient side of a bucket: collection buffer, shard gradient, and ``param.grad``.

[Note: gradient faces]
After a reduction ``param.grad`` is the parameter's *face*: a view of the averaged gradient where
the whole gradient lies on this rank (one rank, stage 0), else one NaN expanded to the true shape.
The face costs no memory and keeps the meaning of ``zero_grad``: a face that is gone tells that the
user has cleared the gradient, a face that is still there that the next backward has to add to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_zero.grads.homes import DeviceHome
from lightning_zero.memory.host import large_blocks_apart
from lightning_zero.plan.layout import BucketLayout

IDLE_STEPS_UNTIL_ABSENT = 3
"""A parameter that no rank used in this many steps is not waited for any more."""


class GradientBucket:
    """Gradients of one bucket on this rank.

    Args:
        layout: Plan of the bucket, the same as of its parameters.
        parameters: Parameters in order of the slots.
        rank: Index of this rank's shard.
        wire_dtype: Dtype in which gradients travel.
        home: Where shard gradients live; None for the device.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        rank: int,
        wire_dtype: torch.dtype,
        home: DeviceHome | None = None,
    ) -> None:
        self.layout = layout
        self.home = DeviceHome(parameters[0].device) if home is None else home
        self.parameters = list(parameters)
        self.wire_dtype = wire_dtype
        self.shard_dtype = torch.promote_types(wire_dtype, parameters[0].dtype)
        self.pieces = {piece.slot: piece for piece in layout.pieces(rank)}
        self.buffer: Tensor | None = None
        """1-D [N] while gradients of this backward are collected or travel."""
        self.arrived: set[int] = set()
        """Slots whose gradient of this backward is in the buffer."""
        self.kept: set[int] = set()
        """Slots whose reduced gradient is to be added to: their face was still there when the next
        gradient came, or is hidden by a local gradient that the last reduction did not take."""
        self.used: set[int] = set()
        """Slots that got a gradient on this rank since they were last cleared."""
        self.watched: set[int] = set()
        """Slots whose gradients are collected: those that have been trained so far."""
        self.times_zeroed = 0
        """How often a gradient was zeroed through its face."""
        self.zeroings = [0] * len(self.parameters)
        """The same for each of the parameters."""
        self.idle_steps = [0] * len(self.parameters)
        """Steps in a row in which no rank used a parameter; the same numbers on all ranks."""
        self._spread: Tensor | None = None
        self._sum_spread: Tensor | None = None
        self._shard_grad: Tensor | None = None
        self._faces: list[Tensor] = []
        self._gaps = layout.gaps()

    @property
    def shard_grad(self) -> Tensor:
        """Averaged gradient of this rank's shard, 1-D [S]; arbitrary content at first."""
        if self._shard_grad is None:
            with large_blocks_apart():  # it stays where buffers of this backward go
                self._shard_grad = self.home.zeros(self.layout.shard_numel, self.shard_dtype)
            self._faces = [self._make_face(slot) for slot in range(len(self.parameters))]
        return self._shard_grad

    def held_shard_grad(self) -> Tensor | None:
        """The shard gradient, if there has been any reduction."""
        return self._shard_grad

    def piece_grad(self, slot: int) -> Tensor:
        """Averaged gradient of this rank's piece of a parameter, 1-D."""
        piece = self.pieces[slot]
        return self.shard_grad[piece.shard_offset : piece.shard_offset + piece.numel]

    def is_complete(self) -> bool:
        """Whether every gradient that can be expected in this backward has arrived."""
        if self.is_full():
            return True
        return bool(self.arrived) and all(
            slot in self.arrived or self.idle_steps[slot] >= IDLE_STEPS_UNTIL_ABSENT
            for slot in self.watched
        )

    def is_full(self) -> bool:
        """Whether every gradient that can come at all has arrived."""
        return bool(self.arrived) and len(self.arrived) == len(self.watched)

    def put(self, slot: int, grad: Tensor, scale: float) -> None:
        """Write a scaled gradient into its place in the buffer."""
        if grad.requires_grad:  # backward(create_graph=True)
            grad = grad.detach()
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        torch.mul(grad, scale, out=self._slot_view(slot))
        self.arrived.add(slot)
        self.used.add(slot)

    def fill_rest(self) -> None:
        """Zero what no gradient of this backward has written."""
        buffer = self._full_buffer()
        for begin, end in self._gaps:
            buffer[begin:end].zero_()
        if len(self.arrived) < len(self.parameters):
            for slot in set(range(len(self.parameters))) - self.arrived:
                self._slot_view(slot).zero_()

    def note_spread(self) -> None:
        """Look at what this rank is about to send, without waiting for what is seen."""
        self._spread = _with_spread(self._spread, self._full_buffer())

    def note_sum_spread(self) -> None:
        """Look at a sum that may overflow though no summand does: fp16 holds no more than 65504."""
        if self.wire_dtype == torch.float16:
            self._sum_spread = _with_spread(self._sum_spread, self.shard_grad)

    def spreads(self) -> tuple[Tensor | None, Tensor | None]:
        """Of this rank's gradients and of their sums, since they were last forgotten.

        Returns:
            0-d float64 each, not finite if a gradient was not; None if there was none to look at.
        """
        return self._spread, self._sum_spread

    def forget_spreads(self) -> None:
        """Begin anew with what is noted."""
        self._spread = self._sum_spread = None

    def prepare_shard_grad(self) -> bool:
        """Clear the pieces whose gradient the user has cleared; True if others must be added to."""
        for slot in set(range(len(self.parameters))) - self.arrived:
            self.note_face(slot)
        self.home.before_accumulation(self, self.kept)
        if not self.kept:
            return False
        for slot in self.pieces.keys() - self.kept:
            self.piece_grad(slot).zero_()
        return True

    def drop(self) -> None:
        """Forget the backward under way after an error."""
        self.home.drop()
        self.buffer = None
        self.arrived.clear()
        self.kept.clear()

    def note_face(self, slot: int) -> None:
        """Look at a face before a new gradient comes, and take it off the parameter.

        Raises:
            RuntimeError: Someone has changed the face in place.
        """
        parameter = self.parameters[slot]
        grad = parameter.grad
        if grad is None:
            if slot not in self.arrived:
                self.used.discard(slot)
                self.kept.discard(slot)
            return
        if not self._faces or grad is not self._faces[slot]:
            return  # a local gradient that is still to be reduced
        self.kept.add(slot)
        parameter.grad = None
        self._check_face(slot)

    def show_faces(self) -> None:
        """Hang the faces on the parameters after a reduction."""
        _ = self.shard_grad
        for slot, (parameter, face) in enumerate(zip(self.parameters, self._faces, strict=True)):
            if parameter.grad is None and (parameter.requires_grad or slot in self.kept):
                parameter.grad = face
        self.arrived.clear()
        self.kept = {slot for slot in range(len(self.parameters)) if self.is_unreduced(slot)}

    def take_faces_off(self) -> None:
        """Leave no placeholder behind in ``param.grad``, and free the shard gradient."""
        for parameter, face in zip(self.parameters, self._faces or self.parameters, strict=True):
            if parameter.grad is face:
                parameter.grad = None
        self._faces, self._shard_grad = [], None

    def is_cleared(self, slot: int) -> bool:
        """Whether the user has cleared the gradient of a parameter since its last reduction."""
        grad = self.parameters[slot].grad
        if grad is not None and self._faces and grad is self._faces[slot]:
            self._check_face(slot)
            return False
        return True

    def has_unreduced(self) -> bool:
        """Whether a parameter holds a local gradient that no reduction has taken."""
        return any(self.is_unreduced(slot) for slot in range(len(self.parameters)))

    def is_unreduced(self, slot: int) -> bool:
        """Whether ``param.grad`` is a local gradient, not a face."""
        grad = self.parameters[slot].grad
        return grad is not None and not (self._faces and grad is self._faces[slot])

    @property
    def is_shown(self) -> bool:
        """Whether faces are views of the gradient, see [Note: gradient faces]."""
        parameter = self.parameters[0]
        is_whole = self.layout.world_size == 1 and self.shard_dtype == parameter.dtype
        return is_whole and self.shard_grad.device == parameter.device

    def _make_face(self, slot: int) -> Tensor:
        place, parameter = self.layout.slots[slot], self.parameters[slot]
        if self.is_shown:
            return self.shard_grad.as_strided(place.shape, place.stride, place.offset)
        nan = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        return nan.expand(place.shape)

    def _check_face(self, slot: int) -> None:
        face = self._faces[slot]
        if face._base is not None and face._base is self._shard_grad or face._version == 0:
            return
        if face.numel() and not bool(face.flatten()[0] == 0):
            raise RuntimeError(
                f"the gradient of {self.layout.slots[slot].fqn!r} was changed in place, but it is"
                " partitioned over the ranks and not there to be changed. Clip with"
                " `self.clip_gradients(...)` or `Trainer(gradient_clip_val=...)`; both use the"
                " norm over all ranks."
            )
        self.zeroings[slot] += 1
        self.times_zeroed += 1  # zero_grad(set_to_none=False)
        if slot in self.pieces:
            self.piece_grad(slot).zero_()
        self._faces[slot] = self._make_face(slot)
        if self.parameters[slot].grad is face:
            self.parameters[slot].grad = self._faces[slot]

    def _slot_view(self, slot: int) -> Tensor:
        place = self.layout.slots[slot]
        return self._full_buffer().as_strided(place.shape, place.stride, place.offset)

    def _full_buffer(self) -> Tensor:
        if self.buffer is None:
            raise AssertionError(f"bucket {self.layout.index} has no gradient buffer")
        return self.buffer


def _with_spread(noted: Tensor | None, values: Tensor) -> Tensor:
    """Largest minus smallest value, added to what was noted: finite if and only if all values are.

    One pass; ``isfinite`` would take twenty times as long on a CPU. float64, so that it cannot
    overflow.
    """
    low, high = torch.aminmax(values.detach())
    spread = high.double() - low.double()
    return spread if noted is None else noted + spread
