"""Loading weights tensor by tensor, into a model that is whole or constructed sharded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero import _compat
from lightning_zero.params import parameter_dict
from lightning_zero.params.bucket import is_placeholder
from lightning_zero.params.sliced import SlicedParameters, owner_of

Source = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def load_state_dict_streamed(module: nn.Module, source: Source, strict: bool = True) -> None:
    """Copy weights and buffers into a module without ever holding all of them.

    Every rank takes its part of each tensor, without any transfer; a file is mapped, not read. For
    use in ``configure_model`` on all ranks, with the same source::

        def configure_model(self):
            self.net = Net()
            lightning_zero.load_state_dict_streamed(self.net, "weights.safetensors")

    Names are those of ``module.state_dict()``; hooks for loading, and what is no tensor, are left
    out.

    Args:
        module: The module, whole or being constructed sharded.
        source: A file of ``torch.save`` (a state dict, or a checkpoint with one under
            ``"state_dict"``), a ``.safetensors`` file (needs the package safetensors), an index of
            several of these (``.index.json``), a state dict, or pairs of name and tensor.
        strict: Names must be the same on both sides; else what is missing stays as it is.

    Raises:
        RuntimeError: Names, shapes or values do not fit; on all ranks.
        ImportError: A safetensors file without the package safetensors.
    """
    slices = owner_of(module)
    problem: Exception | None = None
    try:
        with torch.no_grad():
            _load(module, source, strict, slices)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        problem = error
    if slices is not None:
        text = "" if problem is None else f"{type(problem).__name__}: {problem}"
        told = slices.transfers.tell(text)
        failed = {rank: theirs for rank, theirs in enumerate(told) if theirs}
        if failed and problem is None:
            raise RuntimeError(f"weights could not be loaded on other ranks: {failed}")
    if problem is not None:
        raise problem


class _Target(NamedTuple):
    """Where a name of a state dict leads."""

    owner: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """What is there now, without any effect on it."""
        own = parameter_dict.plain(self.owner)
        tensor = own[self.key] if self.key in own else self.owner._buffers[self.key]
        if tensor is None:
            raise AssertionError(f"{self.key} of {type(self.owner).__name__} is gone")
        return tensor


def _load(module: nn.Module, source: Source, strict: bool, slices: SlicedParameters | None) -> None:
    targets = _targets(module)
    found: set[str] = set()
    unexpected, wrong = [], []
    for name, values in _pairs(source):
        target = targets.get(name)
        if target is None:
            unexpected.append(name)
            continue
        found.add(name)
        if target.tensor.shape != values.shape:
            wrong.append(f"{name}: {tuple(values.shape)} instead of {tuple(target.tensor.shape)}")
        else:
            _write(name, target, values, slices, targets)
        del values  # before the next one comes
    reached = {id(targets[name].tensor) for name in found}  # tied ones count for each other
    missing = [name for name in targets if id(targets[name].tensor) not in reached]
    complaints = [f"shapes do not fit: {wrong}"] if wrong else []
    if strict and missing:
        complaints.append(f"missing: {missing}")
    if strict and unexpected:
        complaints.append(f"unexpected: {unexpected}")
    if complaints:
        raise RuntimeError(
            f"the weights do not fit into {type(module).__name__}: {'; '.join(complaints)}"
            + ("" if wrong else " (strict=False loads what fits)")
        )


def _write(
    name: str,
    target: _Target,
    values: Tensor,
    slices: SlicedParameters | None,
    targets: dict[str, _Target],
) -> None:
    tensor = target.tensor
    if slices is not None and isinstance(tensor, nn.Parameter) and slices.holds(tensor):
        slices.overwrite(tensor, values)
    elif is_placeholder(tensor):
        raise RuntimeError(
            f"{name!r} is sharded by a Trainer that runs: load weights in configure_model, or with"
            " trainer.fit(ckpt_path=...)"
        )
    elif tensor.is_meta:
        if slices is not None:
            slices.make_room(values.numel())
        real = values.to(dtype=tensor.dtype, copy=True)
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, tensor.requires_grad)
        for other in [other for other in targets.values() if other.tensor is tensor]:
            setattr(other.owner, other.key, real)
    else:
        tensor.data.copy_(values)


def _targets(module: nn.Module) -> dict[str, _Target]:
    """All parameters and persistent buffers, under each of their names."""
    found = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        own = {**parameter_dict.plain(owner), **_compat.persistent_buffers(owner)}
        for key, tensor in own.items():
            if tensor is not None:
                found[f"{prefix}.{key}" if prefix else key] = _Target(owner, key)
    return found


def _pairs(source: Source) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, one after the other."""
    if isinstance(source, Mapping):
        yield from ((k, v) for k, v in source.items() if isinstance(v, Tensor))
    elif not isinstance(source, (str, os.PathLike)):
        yield from source
    else:
        path = Path(source)
        if path.name.endswith(".index.json"):
            files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            for file in files:
                yield from _pairs(path.parent / file)
        elif path.suffix == ".safetensors":
            yield from _safetensors(path)
        else:
            state: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            yield from _pairs(state.get("state_dict", state))


def _safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        safe_open: Any = import_module("safetensors").safe_open
    except ImportError as error:
        raise ImportError(
            f"{path.name} is a safetensors file: pip install 'lightning-zero[safetensors]'"
        ) from error
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (this is no dict)
            yield name, file.get_tensor(name)
