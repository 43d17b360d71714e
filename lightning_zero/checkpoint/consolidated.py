"""One ordinary checkpoint: full tensors under the user's names, in plain Lightning's layout.

Everything is gathered bucket by bucket to rank 0: into its memory, or into a file that is mapped
where it would take too much of that (see ``memory.spool``). No rank holds more than one bucket
beyond it, or beyond its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.names import in_torch_form
from lightning_zero.comm import Collectives
from lightning_zero.memory.spool import Keep, copied, gathering
from lightning_zero.optim.masters import MasterShard
from lightning_zero.optim.pieces import MasterPiece, PieceTable, parameters_of
from lightning_zero.params.bucket import ParameterBucket, ParamStatus
from lightning_zero.plan.layout import BucketLayout, Slot

MASTER_KEY = "master_weight"
"""Name under which an fp32 master weight stands among a parameter's optimizer state."""

State = dict[str, Any]


def module_state_dict(
    module: nn.Module, buckets: Sequence[ParameterBucket], collectives: Collectives
) -> State:
    """The module's state dict with full tensors on the CPU of rank 0; empty on other ranks.

    The names are those of ``module.state_dict()``, the user's hooks included: whatever stands for a
    partitioned parameter in it is replaced by the parameter's full value.

    Args:
        module: The model, or a part of it. To be called on all ranks.
        buckets: Its buckets; none if its parameters are whole.
        collectives: Group over which the buckets are sharded.
    """
    is_writer = collectives.rank == 0
    placeholders = {
        pointer: (bucket.layout.index, slot)
        for bucket in buckets
        if bucket.status is ParamStatus.NOT_AVAILABLE
        for slot, pointer in enumerate(bucket.placeholder_pointers())
        if pointer  # one without elements is as whole as it gets
    }
    state: State = module.state_dict()
    with gathering(_nbytes(buckets) if is_writer else 0) as keep:
        names: dict[int, list[tuple[str, int]]] = {}
        copies: dict[tuple[Any, ...], Tensor] = {}
        for name, value in state.items():
            index, slot = placeholders.get(_pointer(value), (None, 0))
            if index is not None:
                names.setdefault(index, []).append((name, slot))
            elif is_writer and isinstance(value, Tensor):
                state[name] = _copy_once(value, copies, keep)
        for bucket in buckets:
            wanted = names.get(bucket.layout.index)
            if not wanted:
                continue
            flat = _gather_flat(collectives, bucket.shard, bucket.layout)
            if flat is not None:
                whole = {slot: keep(_cut(flat, bucket.layout.slots[slot])) for _, slot in wanted}
                state.update((name, whole[slot]) for name, slot in wanted)
            del flat  # before the next one comes
    return state if is_writer else {}


def optimizer_state_dict(
    optimizer: Optimizer,
    table: PieceTable,
    collectives: Collectives,
    names: Mapping[nn.Parameter, str],
) -> State:
    """The optimizer's state dict in torch's own form, full tensors on the CPU of rank 0.

    Element-wise state (of the shape of the pieces) is put together; anything else is taken from the
    lowest rank that has a piece of the parameter. An fp32 master weight is kept as one more state.

    Args:
        optimizer: The user's optimizer. To be called on all ranks.
        table: This rank's pieces of its parameters.
        collectives: Group over which they are sharded.
        names: Name of each parameter of the model.

    Returns:
        ``state``, ``param_groups`` and names by group, which torch ignores; ``state`` is empty on
        ranks other than 0.
    """
    number = {parameter: index for index, parameter in enumerate(parameters_of(optimizer))}
    state: dict[int, State] = {}
    masters = table.masters_of(optimizer)
    locals_ = [_local_states(table, optimizer, master) for master in masters]
    nbytes = sum(_full_nbytes(*pair) for pair in zip(masters, locals_, strict=True))
    with gathering(nbytes if collectives.rank == 0 else 0) as keep:
        for master, local in zip(masters, locals_, strict=True):
            for slot, key, value in _full_states(collectives, master, local, keep):
                parameter = master.gradients.parameters[slot]
                state.setdefault(number[parameter], {})[key] = value
    return in_torch_form(optimizer, state, names)


def full_values(
    values: Mapping[nn.Parameter, Tensor], table: PieceTable, collectives: Collectives
) -> dict[nn.Parameter, Tensor]:
    """Values that the ranks have for their pieces, put together on the CPU of rank 0.

    Args:
        values: A tensor of the shape of each piece. To be called on all ranks.
        table: This rank's pieces.
        collectives: Group over which they are sharded.

    Returns:
        Tensors of the parameters' shapes; empty on ranks other than 0.
    """
    found: dict[nn.Parameter, Tensor] = {}
    nbytes = collectives.world_size * sum(value.nbytes for value in values.values())
    with gathering(nbytes if collectives.rank == 0 else 0) as keep:
        for master in table.masters:
            local: _Local = {
                piece.piece.slot: (piece, {"": values[piece.parameter]})
                for piece in table.pieces()
                if piece.master is master and piece.parameter in values
            }
            for slot, _, value in _full_states(collectives, master, local, keep):
                found[master.parameters.parameters[slot]] = value
    return found


# Gathering.


def local_states(optimizer: Optimizer, piece: MasterPiece) -> State:
    """An optimizer's state of one piece, the fp32 master weight included; empty before any step."""
    piece.master.bring_together()
    here = piece.tensor if piece.tensor in optimizer.state else piece.parameter
    states = dict(optimizer.state.get(here, {}))
    if piece.master.has_copy:
        states[MASTER_KEY] = piece.tensor.detach()
    return states


def dtype_if_elementwise(piece: MasterPiece, value: Any) -> torch.dtype | None:
    """The dtype of a state with one entry per element of the piece; None for any other state."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    return value.dtype if value.shape == piece.tensor.shape else None


_Local = dict[int, tuple[MasterPiece, State]]


def _local_states(table: PieceTable, optimizer: Optimizer, master: MasterShard) -> _Local:
    """This rank's pieces of an optimizer in one bucket, by slot, with their states."""
    found: _Local = {}
    for piece in table.pieces_of(optimizer):
        if piece.master is not master:
            continue
        states = local_states(optimizer, piece)
        if states:
            found[piece.piece.slot] = piece, states
    return found


def _full_states(
    collectives: Collectives, master: MasterShard, local: _Local, keep: Keep
) -> Iterator[tuple[int, str, Any]]:
    """Slot, key and full value of every state in a bucket; nothing on ranks other than 0."""
    layout = master.parameters.layout
    if layout.world_size == 1:  # every rank holds all of it
        for slot, (_, states) in local.items() if collectives.rank == 0 else ():
            yield from ((slot, key, kept(value, keep)) for key, value in states.items())
        return
    described = collectives.exchange_objects(
        {
            slot: {key: dtype_if_elementwise(piece, value) for key, value in states.items()}
            for slot, (piece, states) in local.items()
        }
    )
    for key, dtype in _elementwise_keys(described):
        flat = _gather_flat(collectives, _assemble(master, local, key, dtype), layout)
        if flat is None:
            continue
        for slot in sorted({slot for rank in described for slot in rank if key in rank[slot]}):
            if any(rank.get(slot, {}).get(key) for rank in described):
                yield slot, key, keep(_cut(flat, layout.slots[slot]))
        del flat  # before the next one comes
    others = collectives.gather_objects(
        {
            slot: {
                key: kept(value, copied)
                for key, value in states.items()
                if dtype_if_elementwise(piece, value) is None
            }
            for slot, (piece, states) in local.items()
        }
    )
    for rank in reversed(others or []):  # the lowest rank has the last word
        for slot, states in rank.items():
            yield from ((slot, key, value) for key, value in states.items())


def _elementwise_keys(
    described: list[dict[int, dict[str, torch.dtype | None]]],
) -> list[tuple[str, torch.dtype]]:
    """Keys and dtypes of element-wise states on any rank, in one order on all ranks."""
    found = {
        (key, dtype)
        for rank in described
        for states in rank.values()
        for key, dtype in states.items()
        if dtype is not None
    }
    return sorted(found, key=str)


def _assemble(master: MasterShard, local: _Local, key: str, dtype: torch.dtype) -> Tensor:
    """One state of all pieces, laid out as the shard."""
    shard = torch.zeros(
        master.parameters.layout.shard_numel, dtype=dtype, device=master.tensor.device
    )
    for piece, states in local.values():
        value = states.get(key)
        if isinstance(value, Tensor) and value.dtype == dtype:
            piece.view(shard).copy_(value)
    return shard


def _gather_flat(collectives: Collectives, shard: Tensor, layout: BucketLayout) -> Tensor | None:
    """All shards of a bucket end to end on the CPU of rank 0; None on other ranks."""
    flat = collectives.gather(shard, layout.index)
    return None if flat is None else flat.cpu()


def _cut(flat: Tensor, slot: Slot) -> Tensor:
    """A parameter-shaped view of a flat tensor."""
    return flat.as_strided(slot.shape, slot.stride, slot.offset)


def kept(value: Any, keep: Keep) -> Any:
    """A value, copied if it is a tensor."""
    return keep(value) if isinstance(value, Tensor) else value


def _nbytes(buckets: Sequence[ParameterBucket]) -> int:
    """Bytes of all parameters in these buckets."""
    return sum(bucket.layout.padded_numel * bucket.dtype.itemsize for bucket in buckets)


def _full_nbytes(master: MasterShard, local: _Local) -> int:
    """Bytes of the full states of a bucket, as far as this rank's pieces tell."""
    tensors = [v for _, states in local.values() for v in states.values() if isinstance(v, Tensor)]
    return master.parameters.layout.world_size * sum(tensor.nbytes for tensor in tensors)


def _pointer(value: Any) -> int:
    return value.data_ptr() if isinstance(value, Tensor) and value.numel() else 0


def _copy_once(value: Tensor, copies: dict[tuple[Any, ...], Tensor], keep: Keep) -> Tensor:
    """A CPU copy; tied tensors stay tied."""
    key = (value.data_ptr(), value.dtype, value.shape, value.stride())
    if key not in copies or not value.numel():
        copies[key] = keep(value)
    return copies[key]
