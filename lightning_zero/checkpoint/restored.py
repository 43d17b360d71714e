"""Optimizer state from a checkpoint, matched by parameter name.

Any split fits: this rank cuts its pieces from full tensors, which may be mapped from a file or
stored in parts (``StoredTensor``).

[Note: names]
Our own checkpoints, those with named parameters (``model.named_parameters()`` given to the
optimizer) and those whose state is under names say what it belongs to. Then parameters may have
been added, removed, frozen or put into other groups since. Others only have numbers: their
optimizer must have groups of the same sizes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.consolidated import MASTER_KEY
from lightning_zero.checkpoint.names import NAMES_KEY, plain_name
from lightning_zero.checkpoint.stored import StoredTensor
from lightning_zero.optim.pieces import MasterPiece, PieceTable, parameters_of
from lightning_zero.plan.wording import some

State = dict[str, Any]
MAX_NAMED = 10
"""Names that a message lists."""


class RestoreWarning(UserWarning):
    """Some state of a checkpoint has no place here, or some state here is not in the checkpoint."""


class _Saved(NamedTuple):
    """A saved optimizer, by the names of this one's parameters."""

    state: dict[nn.Parameter, State]
    """State of each parameter that has some."""
    options: list[State | None]
    """Options of each group; None where it keeps its own."""


def load_optimizer_state_dict(
    optimizer: Optimizer,
    table: PieceTable,
    state_dict: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
    is_speaker: bool = True,
) -> None:
    """Cut this rank's pieces from a full optimizer state dict.

    Args:
        optimizer: The user's optimizer.
        table: This rank's pieces of its parameters.
        state_dict: In torch's own form, full or stored tensors, the same on all ranks.
        names: Name of each parameter of the model.
        is_speaker: Tell the user what does not come from the checkpoint.

    Raises:
        ValueError: The state cannot belong to these parameters; on all ranks.
    """
    saved, notice = _matched(optimizer, table, state_dict, names)
    if notice and is_speaker:
        warnings.warn(notice, RestoreWarning, stacklevel=2)
    _check_shapes(saved, table, names)
    packed_state: dict[int, State] = {}
    packed_groups = []
    count = 0
    for group, options in zip(optimizer.param_groups, saved.options, strict=True):
        first = count
        for parameter in group["params"]:
            piece = table.piece(parameter)
            if piece is None:
                continue
            if parameter in saved.state:
                packed_state[count] = _cut_states(piece, saved.state[parameter])
            count += 1
        own = {key: value for key, value in group.items() if key != "params"}
        packed_groups.append(
            {**(own if options is None else options), "params": list(range(first, count))}
        )
    optimizer.state.clear()
    with table.swapped(optimizer, frozenset()):
        optimizer.load_state_dict({"state": packed_state, "param_groups": packed_groups})


def claimed(
    optimizer: Optimizer,
    table: PieceTable,
    state_dict: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
) -> dict[nn.Parameter, str]:
    """Parameters of an optimizer, by name, that are not trained now and have state to keep.

    Args: as for :func:`load_optimizer_state_dict`.
    """
    state = _matched(optimizer, table, state_dict, names)[0].state
    return {p: names[p] for p in state if p not in table and p in names}


def told_of_count(optimizers: int, saved: int) -> str:
    """What to tell where a checkpoint has state of fewer or more optimizers than there are."""
    if optimizers == saved:
        return ""
    rest = "those after it start fresh" if optimizers > saved else "the state of others is not used"
    common = min(optimizers, saved)
    return (
        f"the checkpoint has state of {saved} optimizer(s), and there are {optimizers} here: the"
        f" first {common} go on in the order of configure_optimizers, {rest}."
    )


# Which state belongs to whom.


def _matched(
    optimizer: Optimizer,
    table: PieceTable,
    state_dict: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
) -> tuple[_Saved, str]:
    """What was saved for whom, and what to tell about the rest."""
    saved_names = _saved_names(state_dict)
    if saved_names is None:
        return _by_number(optimizer, state_dict), ""
    all_saved = set(chain.from_iterable(saved_names))
    own = _own_names(optimizer, all_saved, names)
    if NAMES_KEY not in state_dict and all_saved.isdisjoint(own.values()):
        # Names that a user has made up, or of a part of the model. Torch takes no notice of them.
        return _by_number(optimizer, state_dict), ""
    elsewhere = {plain_name(name) for parameter, name in names.items() if parameter in table}
    return _by_name(optimizer, table, state_dict, saved_names, own, elsewhere)


def _own_names(
    optimizer: Optimizer, saved: set[str], names: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, str]:
    """Names of this optimizer's parameters: in the model, or as given to it if the saved ones are.

    An optimizer of ``model.net.named_parameters()`` has names that lack ``net.``.
    """
    in_model = {p: plain_name(names.get(p, "")) for p in parameters_of(optimizer)}
    given = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    if len(given) != len(in_model):
        return in_model
    as_given = dict(zip(in_model, map(plain_name, given), strict=True))
    return max((in_model, as_given), key=lambda own: len(saved.intersection(own.values())))


def _saved_names(state_dict: Mapping[str, Any]) -> list[list[str]] | None:
    """Names of the parameters of each saved group; None if the checkpoint has only numbers."""
    groups = state_dict["param_groups"]
    if NAMES_KEY in state_dict:
        found = state_dict[NAMES_KEY]
    elif all("param_names" in group for group in groups):
        found = [group["param_names"] for group in groups]
    else:
        found = [group["params"] for group in groups]
    fits = [len(of_group) for of_group in found] == [len(group["params"]) for group in groups]
    if not fits or not all(isinstance(name, str) and name for group in found for name in group):
        return None
    return [[plain_name(name) for name in group] for group in found]


def _by_number(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> _Saved:
    saved_groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"the checkpoint's {type(optimizer).__name__} has parameter groups of {saved_sizes}"
            f" parameters, but this one has groups of {sizes}, and the checkpoint does not name"
            " its parameters as this one does. Build the optimizer as it was when the checkpoint"
            " was written, or load the weights only."
        )
    numbers = (number for group in saved_groups for number in group["params"])
    state = {
        parameter: state_dict["state"][number]
        for parameter, number in zip(parameters_of(optimizer), numbers, strict=True)
        if number in state_dict["state"]
    }
    return _Saved(state, [_options(group) for group in saved_groups])


def _by_name(
    optimizer: Optimizer,
    table: PieceTable,
    state_dict: Mapping[str, Any],
    saved_names: list[list[str]],
    own: Mapping[nn.Parameter, str],
    trained: set[str],
) -> tuple[_Saved, str]:
    """State by name; ``trained`` are the names of what any optimizer of the model trains."""
    groups = state_dict["param_groups"]
    by_name: dict[str, State] = {}
    group_of: dict[str, int] = {}
    for index, (group, of_group) in enumerate(zip(groups, saved_names, strict=True)):
        for number, name in zip(group["params"], of_group, strict=True):
            group_of[name] = index
            if number in state_dict["state"]:
                by_name[name] = state_dict["state"][number]
    state = {parameter: by_name[name] for parameter, name in own.items() if name in by_name}
    if not state and not trained.isdisjoint(by_name):
        raise ValueError(
            f"all state that the checkpoint has for this {type(optimizer).__name__} is of"
            f" parameters that another optimizer trains: {_some(sorted(trained & by_name.keys()))};"
            f" this one has {_some(own.values())}. Give the optimizers the order and the parameters"
            " they had, or load the weights only."
        )
    fresh = [name for p, name in own.items() if name not in group_of and p in table]
    used = {name for parameter, name in own.items() if parameter in table}
    dropped = sorted(name for name in group_of if name not in used and name in by_name)
    return _Saved(state, _options_by_name(optimizer, own, group_of, groups)), _notice(
        optimizer, fresh, dropped
    )


def _options_by_name(
    optimizer: Optimizer,
    own: Mapping[nn.Parameter, str],
    group_of: Mapping[str, int],
    groups: Sequence[State],
) -> list[State | None]:
    """Options of each group: of the saved one that most of it comes from; its own if all is new."""
    found: list[State | None] = []
    for index, group in enumerate(optimizer.param_groups):
        votes = Counter(group_of[own[p]] for p in group["params"] if own[p] in group_of)
        most = max(votes.values(), default=0)
        likely = [at for at, count in votes.items() if count == most]
        came_from = index if index in likely else next(iter(likely), None)
        found.append(None if came_from is None else _options(groups[came_from]))
    return found


def _options(group: Mapping[str, Any]) -> State:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _notice(optimizer: Optimizer, fresh: list[str], dropped: list[str]) -> str:
    """What does not come from the checkpoint, and what does not go anywhere."""
    kind = type(optimizer).__name__
    told = []
    if fresh:
        told.append(f"the checkpoint does not know {_some(fresh)}, which start fresh")
    if dropped:
        told.append(
            f"its state of {_some(dropped)} is not used, since this {kind} does not train them"
        )
    return f"{kind}: {'; '.join(told)}." if told else ""


def _some(names: Iterable[str]) -> str:
    return some(map(repr, names), MAX_NAMED)


# Whether it fits, and cutting.


def _check_shapes(saved: _Saved, table: PieceTable, names: Mapping[nn.Parameter, str]) -> None:
    """Every rank looks at every parameter, so all of them raise, or none."""
    strange: list[str] = []
    cut: list[str] = []
    for parameter, states in saved.state.items():
        if parameter not in table:
            continue
        place, slot = table.place[parameter]
        layout, shape = place.layout, tuple(place.layout.slots[slot].shape)
        first, last = layout.slots[slot].offset, layout.slots[slot].end - 1
        is_cut = first // layout.shard_numel < last // layout.shard_numel
        shapes = {key: tuple(v.shape) for key, v in states.items() if _is_array(v)}
        is_strange = _is_of_another_parameter(shapes, shape)
        for key, found in shapes.items():
            if found != shape and (is_strange or is_cut):
                (strange if is_strange else cut).append(
                    f"{key!r} of {names.get(parameter, '?')!r} has shape {found}, the parameter has"
                    f" {shape}"
                )
    wrong = strange or cut
    if wrong:
        raise ValueError(
            f"optimizer state in the checkpoint does not fit: {'; '.join(wrong[:MAX_NAMED])}"
            f"{' and more' if len(wrong) > MAX_NAMED else ''}. {_HAS_CHANGED if strange else _CUT}"
        )


_HAS_CHANGED = (
    "Build the model as it was when the checkpoint was written, or load the weights only."
)
_CUT = (
    "State of another shape than its parameter cannot be cut for a rank: load it with the sharding"
    " it was written with (shard_by='tensor', the same number of ranks), or load the weights only."
)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, StoredTensor)) and len(value.shape) > 0


def _is_of_another_parameter(shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Whether states are one per element of a parameter, but not of one of this shape.

    Rows, columns and factors are no such states: they have several shapes, or stretch to this one.
    """
    if shapes.get(MASTER_KEY, shape) != shape:
        return True
    (one, *others) = set(shapes.values()) or {shape}
    if others or one == shape or len(one) != len(shape):
        return False
    return any(size not in (1, wanted) for size, wanted in zip(one, shape, strict=True))


def _cut_states(piece: MasterPiece, saved: State) -> State:
    states = {key: _adopted(piece, key, cut_state(piece, value)) for key, value in saved.items()}
    master = states.pop(MASTER_KEY, None)
    if master is not None and piece.master.has_copy:
        with torch.no_grad():
            piece.tensor.copy_(master)
    return states


def _adopted(piece: MasterPiece, key: str, value: Any) -> Any:
    """A state, moved to where the master's bucket has such states."""
    if key == MASTER_KEY or not isinstance(value, Tensor) or value.shape != piece.tensor.shape:
        return value
    room = piece.master.room_for_state(key, value.dtype)
    return value if room is None else piece.view(room).copy_(value)


def cut_state(piece: MasterPiece, value: Any) -> Any:
    """This rank's piece of a full or stored state of a parameter, in memory of its own."""
    slot = piece.slot
    begin, end = piece.piece.param_offset, piece.piece.param_offset + piece.piece.numel
    if isinstance(value, StoredTensor):
        if piece.is_whole or value.stride != slot.stride:
            value = value.full()
        else:
            return value.read(begin, end)
    if not isinstance(value, Tensor) or value.dim() == 0 or piece.is_whole:
        return value.clone() if isinstance(value, Tensor) else value
    if value.stride() == slot.stride:
        return value.as_strided((slot.numel,), (1,), value.storage_offset())[begin:end].clone()
    dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype).copy_(value)
    return dense.as_strided((slot.numel,), (1,))[begin:end].clone()
