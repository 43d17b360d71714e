"""A checkpoint of DeepSpeed's ZeRO as one ordinary checkpoint of Lightning.

[Note: where weights come from]
Trained parameters come from the ranks' fp32 slices, frozen ones from where they are whole or in
slices of their own, buffers and the rest from the module's entries. In those, parameters are 16-bit
copies, or empty at stage 3. Two names of one tensor stay so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.consolidated import MASTER_KEY
from lightning_zero.checkpoint.deepspeed_files import Folder, find, holds_stand_in
from lightning_zero.checkpoint.deepspeed_layout import (
    FlatGroup,
    Run,
    flat_groups,
    joined,
    sliced,
    some,
)
from lightning_zero.checkpoint.files import save_file
from lightning_zero.checkpoint.names import NAMES_KEY, plain_name
from lightning_zero.memory.spool import Keep, gathering, usual_folders

State = dict[str, Any]

_OWN_KEYS = {  # of DeepSpeed in the file with the module; anything else is the user's
    *("module", "buffer_names", "optimizer", "param_shapes", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments", "lr_scheduler", "data_sampler"),
    *("random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
    *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
}


class DeepSpeedImportWarning(UserWarning):
    """Part of a DeepSpeed checkpoint is not in the file that was made of it."""


class _NoStatesError(Exception):
    """Why the optimizer's states cannot be taken over."""


def import_deepspeed(directory: Path | str, file: Path | str, is_trusted: bool = False) -> None:
    """Write a DeepSpeed checkpoint as one ordinary file of Lightning.

    Files are mapped, and put together tensor by tensor. Where memory is scarce, what is done lies
    in a temporary file beside the new one until that is written. See :func:`read_deepspeed`.

    Args:
        directory: The folder with ``latest``, or one with ``*_optim_states.pt``.
        file: To be written, or replaced.
        is_trusted: Make all objects that the files name, which can run any code that is in them.

    Raises:
        OSError: The disk is full; besides what :func:`read_deepspeed` raises.
    """
    file, found = Path(file), find(Path(directory))
    file.parent.mkdir(parents=True, exist_ok=True)
    folders = [file.parent, *usual_folders()]
    with gathering(found.nbytes, folders=folders) as keep:
        save_file(_read(found, is_trusted, keep), file)


def read_deepspeed(directory: Path | str, is_trusted: bool = False) -> State:
    """A DeepSpeed checkpoint of ZeRO stage 1, 2 or 3 in the layout of Lightning, in memory.

    Args:
        directory: The folder with ``latest``, or one with ``*_optim_states.pt``.
        is_trusted: Make all objects that the files name, which can run any code that is in them.
            Else user's values which hold such objects are left out, with a warning.

    Returns:
        ``state_dict`` with full tensors, 16-bit ones as fp32, tied ones as one; if they are there,
        ``optimizer_states`` in torch's own form, with the names of the parameters; and what
        Lightning, or the user, had saved besides. Parameter groups list trained parameters only:
        DeepSpeed's files do not tell in which one a frozen one was.

    Raises:
        FileNotFoundError: No such folder, or a rank's file is missing.
        ValueError: The files do not belong together, or are of a kind that cannot be put together.
        pickle.UnpicklingError: A file cannot be read without running its code.
    """
    return _read(find(Path(directory)), is_trusted, lambda tensor: tensor)


def _read(folder: Folder, is_trusted: bool, keep: Keep) -> State:
    run = Run.read(folder, is_trusted)
    groups = flat_groups(run)
    trained = _trained(groups, keep)
    state_dict = _state_dict(run, trained, keep)
    checkpoint = _users_entries(run.model)
    prefix = _wrapper_prefix(checkpoint, state_dict)
    checkpoint["state_dict"] = {_own_name(n, prefix): value for n, value in state_dict.items()}
    checkpoint.pop("optimizer_states", None)
    try:
        optimizer = _optimizer_state(run, groups, trained, keep)
    except _NoStatesError as reason:
        _warn(f"the optimizer's states are left out: {reason}. The weights are complete.")
    else:
        names = [[_own_name(n, prefix) for n in of_group] for of_group in optimizer[NAMES_KEY]]
        checkpoint["optimizer_states"] = [{**optimizer, NAMES_KEY: names}]
    _complete(checkpoint, run.model)
    return checkpoint


# Weights.


def _full_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 in place of 16-bit floats, which DeepSpeed casts whole models to."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _trained(groups: Sequence[FlatGroup], keep: Keep) -> dict[str, Tensor]:
    return {
        name: keep(
            joined(group.pieces(group.masters, name), shape, _full_dtype(group.masters[0].dtype))
        )
        for group in groups
        for name, shape in group.shapes.items()
    }


def _frozen(run: Run, keep: Keep) -> dict[str, Tensor]:
    """Frozen weights that are kept apart from the module's entries."""
    found = {}
    for name, shape in (run.model.get("frozen_param_shapes") or {}).items():
        by_rank = [(model.get("frozen_param_fragments") or {}).get(name) for model in run.models]
        fragments = [fragment for fragment in by_rank if isinstance(fragment, Tensor)]
        if len(fragments) != len(by_rank):
            raise ValueError(f"{run.folder.path} lacks ranks' slices of the frozen weight {name!r}")
        flat = [fragment.detach().reshape(-1) for fragment in fragments]
        pieces = sliced(flat, torch.Size(shape)) if run.is_sliced else flat
        try:
            found[name] = keep(joined(pieces, torch.Size(shape), _full_dtype(flat[0].dtype)))
        except ValueError as error:
            raise ValueError(
                f"the frozen weight {name!r} cannot be put together: {error}. Files are of"
                " different runs, or its values are in files of their own (offload to NVMe)."
            ) from error
    return found


def _state_dict(run: Run, trained: Mapping[str, Tensor], keep: Keep) -> State:
    """All entries of the module, in its order."""
    known = {**_frozen(run, keep), **trained}
    tied = run.model.get("shared_params") or {}
    buffers = set(run.model.get("buffer_names") or ())
    copies: dict[tuple[Any, ...], Tensor] = {}
    state: State = {}
    lost = []
    for name, value in run.model["module"].items():
        source = name if name in known else tied.get(name)
        if source in known:
            state[name] = known[source]
        elif not isinstance(value, Tensor):
            if holds_stand_in(value):
                lost.append(name)
            else:
                state[name] = value
        elif run.is_sliced and not value.numel() and name not in buffers:
            lost.append(name)
        else:
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if place not in copies or not value.numel():
                flat = value.detach().reshape(-1)
                copies[place] = keep(joined([flat], value.shape, _full_dtype(value.dtype)))
            state[name] = copies[place]
    if lost:
        _warn(
            f"the files do not hold {some(lost)}: parameters that are neither trained nor frozen,"
            " or objects that could run code. They are not in the new checkpoint."
        )
    return {**state, **{name: value for name, value in known.items() if name not in state}}


# The optimizer.


def _optimizer_state(
    run: Run, groups: Sequence[FlatGroup], trained: Mapping[str, Tensor], keep: Keep
) -> State:
    """In torch's own form, with names.

    Raises:
        _NoStatesError: It cannot be put together.
    """
    saved = [_saved_optimizer(run, zero) for zero in run.optimizers]
    listed = [index for group in saved[0]["param_groups"] for index in group["params"]]
    if listed != list(range(len(groups))):
        raise _NoStatesError(f"its parameters are the flat groups {listed} of {len(groups)}")
    state: dict[int, State] = {}
    param_groups, names = [], []
    first = 0
    for options in saved[0]["param_groups"]:
        members = [groups[index] for index in options["params"]]
        of_group = [name for member in members for name in member.shapes]
        if not run.is_sliced and run.zero_option("round_robin_gradients"):
            of_group = _before_round_robin(of_group, run.world_size)
        numbers = {name: number for number, name in enumerate(of_group, first)}
        first += len(of_group)
        kept = {key: value for key, value in options.items() if key not in ("params", "step")}
        if holds_stand_in(kept):
            raise _NoStatesError(f"options of its groups are objects of unknown types ({kept})")
        param_groups.append({**kept, "params": list(numbers.values())})
        names.append(of_group)
        for index, member in zip(options["params"], members, strict=True):
            by_rank = [dict(theirs["state"].get(index) or {}) for theirs in saved]
            if "step" in options:  # of older versions, which count for a whole group
                for states in by_rank:
                    if states:
                        states.setdefault("step", options["step"])
            for name, states in _states_of(member, by_rank, keep):
                if _is_copy(run.model["module"].get(name)):
                    states[MASTER_KEY] = trained[name]
                state[numbers[name]] = states
    return {
        "state": dict(sorted(state.items())),
        "param_groups": param_groups,
        NAMES_KEY: names,
    }


def _saved_optimizer(run: Run, zero: State) -> State:
    """A rank's state dict of the optimizer that ZeRO wraps."""
    found = zero.get("optimizer_state_dict" if run.is_sliced else "base_optimizer_state")
    if isinstance(found, (list, tuple)):
        raise _NoStatesError("checkpoints of the elastic kind do not hold the groups' options")
    if not isinstance(found, dict) or not {"state", "param_groups"} <= found.keys():
        raise _NoStatesError("the files do not hold them")
    return found


def _states_of(
    group: FlatGroup, by_rank: Sequence[State], keep: Keep
) -> Iterator[tuple[str, State]]:
    """Name and state of each parameter; nothing if there was no step yet."""
    keys = list(by_rank[0])
    if any(set(states) != set(keys) for states in by_rank):
        raise _NoStatesError(f"ranks hold different states: {[sorted(s) for s in by_rank]}")
    values = {key: [states[key] for states in by_rank] for key in keys}
    flat = {key for key in keys if key != "step" and group.is_elementwise(values[key])}
    for key in set(keys) - flat - {"step"}:
        value = values[key][0]
        if holds_stand_in(value) or (isinstance(value, Tensor) and value.dim()):
            raise _NoStatesError(
                f"{key!r} has not one value per element of the parameters. It belongs to whole"
                " tensors, or is in files of its own (offload to NVMe)"
            )
    for name, shape in group.shapes.items() if keys else ():
        states: State = {}
        for key in keys:
            first = values[key][0]
            if key in flat:
                pieces = group.pieces(values[key], name)
                states[key] = keep(joined(pieces, shape, first.dtype))
            elif key == "step":
                states[key] = torch.tensor(float(first), dtype=torch.float32)
            else:
                states[key] = first.clone() if isinstance(first, Tensor) else first
        yield name, states


def _is_copy(value: Any) -> bool:
    """Whether the model was trained with 16-bit copies of its weights."""
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _before_round_robin(names: Sequence[str], world_size: int) -> list[str]:
    """Names in the order of the parameter group; DeepSpeed dealt them out to the ranks."""
    dealt = [index for first in range(world_size) for index in range(first, len(names), world_size)]
    return [name for _, name in sorted(zip(dealt, names, strict=True))]


# The rest.


def _users_entries(model: State) -> State:
    """What Lightning, or the user, had put beside the module."""
    entries = {key: value for key, value in model.items() if key not in _OWN_KEYS}
    dropped = [key for key, value in entries.items() if holds_stand_in(value)]
    if dropped:
        _warn(
            f"{some(map(str, dropped))} hold objects that could run code when they are read, and"
            " are left out. Only if you trust who wrote the checkpoint, read them as they are"
            " (--trust)."
        )
    return {key: value for key, value in entries.items() if key not in dropped}


def _wrapper_prefix(checkpoint: State, names: Iterable[str]) -> str:
    """What older versions of Lightning put before all names."""
    told = str(checkpoint.get("pytorch-lightning_version", ""))
    for prefix, since in (("_forward_module.", ("1.", "2.")), ("module.", ("1.",))):
        if told.startswith(since) and all(name.startswith(prefix) for name in names):
            return prefix
    return ""


def _own_name(name: str, prefix: str) -> str:
    """A name as the module has it without wrappers."""
    return plain_name(name.removeprefix(prefix))


def _complete(checkpoint: State, model: State) -> None:
    """Add what Lightning asks of a checkpoint that it did not write."""
    schedule = model.get("lr_scheduler")
    is_torch = isinstance(schedule, dict) and "last_epoch" in schedule
    known = [schedule] if is_torch and not holds_stand_in(schedule) else []
    checkpoint.setdefault("lr_schedulers", known)
    if "pytorch-lightning_version" in checkpoint:
        return
    steps = int(model.get("global_steps") or 0)
    checkpoint["pytorch-lightning_version"] = version("lightning")
    checkpoint.setdefault("epoch", 0)
    checkpoint.setdefault("global_step", steps)
    counted = {"total": {"ready": steps, "completed": steps}, "current": {}}
    optimizer = {"step": counted, "zero_grad": {"total": {}, "current": {}}}
    fit = {
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        "epoch_loop.manual_optimization.optim_step_progress": counted,
    }
    others: State = {f"{name}_loop": {} for name in ("validate", "test", "predict")}
    checkpoint.setdefault("loops", {"fit_loop": fit, **others})


def _warn(text: str) -> None:
    warnings.warn(text[0].upper() + text[1:], DeepSpeedImportWarning, stacklevel=3)
