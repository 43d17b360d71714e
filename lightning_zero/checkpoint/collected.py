"""What a sharded checkpoint holds of a model and its optimizers, and which parts this rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Size, Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.consolidated import dtype_if_elementwise, kept, local_states
from lightning_zero.checkpoint.names import in_torch_form, plain_name
from lightning_zero.checkpoint.stored import Part, StoredTensor
from lightning_zero.comm import Collectives
from lightning_zero.memory.spool import copied
from lightning_zero.optim.pieces import MasterPiece, PieceTable, parameters_of
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.params.dense import dense_stride, flatten
from lightning_zero.params.slice import Slice
from lightning_zero.params.sliced import SlicedParameters
from lightning_zero.plan.slices import slice_range

State = dict[str, Any]
Names = Mapping[nn.Parameter, str]

WHOLE_MIN_NUMEL = 2**12
"""Parameters that every rank holds are split over the ranks from this size on."""


class WeightParts:
    """Parameters of a model, as the ranks hold them between steps.

    Args:
        names: Name of each parameter of the model.
        buckets: Buckets of those that an engine has.
        control: Group of the ranks that write.
        slices: Of a model that is sharded while no engine has it.
    """

    def __init__(
        self,
        names: Names,
        buckets: Sequence[ParameterBucket],
        control: Collectives,
        slices: SlicedParameters | None = None,
    ) -> None:
        self._control = control
        self._buckets = buckets
        self._slices = slices
        self._stored: dict[nn.Parameter, StoredTensor] = {}
        for bucket in buckets:
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                if slot.numel and parameter in names:  # else it was replaced by another one
                    self._stored[parameter] = _weight(names[parameter], parameter, slot.stride)
        for parameter, name in names.items():
            known = self._slice(parameter)
            is_large = parameter.numel() >= WHOLE_MIN_NUMEL
            if parameter not in self._stored and (known is not None or is_large):
                stride = dense_stride(parameter) if known is None else tuple(known.stride)
                self._stored[parameter] = _weight(name, parameter, stride)

    def put_into(self, state: Mapping[str, Any]) -> State:
        """A state dict of the model with stored tensors in place of parameters."""
        places = {_place(parameter): stored for parameter, stored in self._stored.items()}
        return {
            plain_name(name): places.get(_place(value), value)
            if isinstance(value, Tensor) and value.numel()
            else value
            for name, value in state.items()
        }

    def __iter__(self) -> Iterator[Part]:
        in_buckets = set()
        for bucket in self._buckets:
            in_buckets |= set(bucket.parameters)
            for piece in bucket.pieces():
                stored = self._stored.get(bucket.parameters[piece.slot])
                if stored is None:
                    continue
                values = bucket.shard[piece.shard_offset : piece.shard_offset + piece.numel]
                part = Part(stored, piece.param_offset, values)
                is_everywhere = bucket.layout.world_size == 1
                yield from _own(part, self._control) if is_everywhere else (part,)
        for parameter, stored in self._stored.items():
            if parameter in in_buckets:
                continue
            known = self._slice(parameter)
            if known is None:
                yield from _own(Part(stored, 0, flatten(parameter, stored.stride)), self._control)
            else:
                rank, world_size = self._control.rank, self._control.world_size
                begin, end = slice_range(stored.numel, world_size, rank)
                if begin < end:
                    values = known.own_values(rank, world_size)[: end - begin]
                    yield Part(stored, begin, values)

    def _slice(self, parameter: nn.Parameter) -> Slice | None:
        if self._slices is None or not self._slices.holds(parameter):
            return None
        return self._slices.known(parameter)


def _weight(name: str, parameter: nn.Parameter, stride: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(f"weights/{plain_name(name)}", parameter.shape, stride, parameter.dtype)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _own(part: Part, control: Collectives) -> Iterator[Part]:
    """This rank's share of what every rank holds."""
    begin, end = slice_range(part.values.numel(), control.world_size, control.rank)
    if begin < end:
        yield Part(part.tensor, part.offset + begin, part.values[begin:end])


class ValueParts:
    """Other values of what is trained, such as averages.

    Args:
        label: What they are called among the tensors of a checkpoint.
        values: A tensor of the shape of each of this rank's pieces. To be made on all ranks.
        table: This rank's pieces.
        names: Name of each parameter.
        control: Group of the ranks that write.
    """

    def __init__(
        self,
        label: str,
        values: Mapping[nn.Parameter, Tensor],
        table: PieceTable,
        names: Names,
        control: Collectives,
    ) -> None:
        self._control = control
        self._here = [(p, values[p.parameter]) for p in table.pieces() if p.parameter in values]
        mine = {
            name: StoredTensor(
                f"{label}/{plain_name(name)}",
                Size(piece.slot.shape),
                piece.slot.stride,
                value.dtype,
            )
            for piece, value in self._here
            for name in [names[piece.parameter]]
        }
        everywhere: dict[str, StoredTensor] = {}
        for theirs in control.exchange_objects(mine, "save a sharded checkpoint"):
            everywhere |= theirs
        self.stored = {p: everywhere[name] for p, name in names.items() if name in everywhere}
        """What stands for the full value of each parameter, the same on all ranks."""

    def __iter__(self) -> Iterator[Part]:
        for piece, value in self._here:
            flat = flatten(value, piece.slot.stride if piece.is_whole else (1,))
            part = Part(self.stored[piece.parameter], piece.piece.param_offset, flat)
            is_everywhere = piece.master.parameters.layout.world_size == 1
            yield from _own(part, self._control) if is_everywhere else (part,)


def stored_optimizer_state(
    optimizer: Optimizer, index: int, table: PieceTable, names: Names, control: Collectives
) -> State:
    """An optimizer's state dict in torch's own form, stored tensors for element-wise state.

    Args:
        optimizer: The user's optimizer. To be called on all ranks.
        index: Its number among the optimizers.
        table: This rank's pieces of its parameters.
        names: Name of each parameter.
        control: Group of the ranks that write.

    Returns:
        The same on all ranks; other state is that of the lowest rank with a piece.
    """
    mine: dict[int, State] = {}
    numbers = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
    for piece in table.pieces_of(optimizer):
        states = local_states(optimizer, piece)
        if states:
            number = numbers[piece.parameter]
            mine[number] = {
                key: _stored(index, piece, names, key, value) or kept(value, copied)
                for key, value in states.items()
            }
    state: dict[int, State] = {}
    for theirs in reversed(control.exchange_objects(mine, "save a sharded checkpoint")):
        for number, states in theirs.items():
            state.setdefault(number, {}).update(states)
    return in_torch_form(optimizer, state, names)


def optimizer_parts(
    optimizer: Optimizer, index: int, table: PieceTable, names: Names, control: Collectives
) -> Iterator[Part]:
    """This rank's parts of what :func:`stored_optimizer_state` describes."""
    for piece in table.pieces_of(optimizer):
        is_everywhere = piece.master.parameters.layout.world_size == 1
        for key, value in local_states(optimizer, piece).items():
            stored = _stored(index, piece, names, key, value)
            if stored is not None:
                flat = flatten(value, piece.slot.stride if piece.is_whole else (1,))
                part = Part(stored, piece.piece.param_offset, flat)
                yield from _own(part, control) if is_everywhere else (part,)


def _stored(
    index: int, piece: MasterPiece, names: Names, key: str, value: Any
) -> StoredTensor | None:
    """Description of an element-wise state; None for any other."""
    dtype = dtype_if_elementwise(piece, value)
    if dtype is None:
        return None
    name = plain_name(names[piece.parameter])
    full = f"optimizers/{index}/{name}/{key}"
    return StoredTensor(full, Size(piece.slot.shape), piece.slot.stride, dtype)
