"""The files of a DeepSpeed checkpoint: which there are, and what is in them, without running code.

[Note: stand-ins]
The files name classes of DeepSpeed, and of whatever users put beside the model. None of them is
needed to read tensors and plain values. Each name that ``torch.load`` does not know to be harmless
is given an empty class of ours, which takes any arguments and does nothing: no class is imported
and no code of the file runs. What turns out to hold such a stand-in is no value.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.files import HARMLESS

State = dict[str, Any]

LATEST = "latest"
"""The file that says which sub-folder is the newest checkpoint."""
MAX_LISTED = 8
"""File names that a message lists."""

_OPTIMIZER_FILE = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = "mp_rank_00_model_states.pt"
_RANK_MODEL_FILE = "zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
_LEGACY_PICKLES = 4  # a magic number, a version, the system, and the objects
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # in Python 3
_REFUSED = {  # what other files of a folder tell about the run
    "layer_*_expert_*": "experts of a mixture that were spread over ranks",
    "expert_*_model_states.pt": "experts of a mixture that were spread over ranks",
    "expp_rank_*": "experts of a mixture that were spread over ranks",
    "layer_*-model_states.pt": "a model that was cut into pipeline stages",
    "*mp_rank_01*": "tensors that were cut by tensor parallelism",
}


class StandIn:
    """In place of an object whose class is not made; see [Note: stand-ins]."""

    arguments: tuple[Any, ...] = ()

    def __new__(cls, *arguments: Any, **options: Any) -> StandIn:
        """Take anything."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """As of a list."""

    def extend(self, values: Any) -> None:
        """As of a list."""


class Folder(NamedTuple):
    """Files of one checkpoint."""

    path: Path
    prefix: str
    """How the names of the optimizer files begin."""
    ranks: list[int]
    """Ranks whose optimizer files are there."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files with states."""
        return sum(file.stat().st_size for file in self.path.glob("*_states.pt"))

    @property
    def any_optimizer_file(self) -> Path:
        """That of the lowest rank which is there."""
        return self.path / self._optimizer_name(self.ranks[0])

    def optimizer_files(self, world_size: int) -> list[Path]:
        """One for each rank, in order.

        Raises:
            FileNotFoundError: Some are missing.
            ValueError: There are more than ranks.
        """
        names = [self._optimizer_name(rank) for rank in range(world_size)]
        _require(self.path, names)
        if len(self.ranks) > world_size:
            raise ValueError(
                f"{self.path} was written by {world_size} ranks, but has files of"
                f" {len(self.ranks)}: {self._optimizer_name(self.ranks[-1])} is of another run."
                " Remove what does not belong there."
            )
        return [self.path / name for name in names]

    def model_files(self, world_size: int, is_each_rank: bool) -> list[Path]:
        """The files with modules: of each rank, or the one that all ranks share.

        Raises:
            FileNotFoundError: Some are missing.
        """
        ranks = range(world_size)
        names = [_RANK_MODEL_FILE.format(rank=r) for r in ranks] if is_each_rank else [_MODEL_FILE]
        _require(self.path, names)
        return [self.path / name for name in names]

    def _optimizer_name(self, rank: int) -> str:
        return f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


# Which files there are.


def find(directory: Path) -> Folder:
    """The checkpoint in a folder: in the one that ``latest`` names, or the folder itself.

    Raises:
        FileNotFoundError: There is no such folder, or no checkpoint in it.
        ValueError: The folder has files of a kind that cannot be put together.
    """
    path = _tag_folder(Path(directory))
    names = sorted(file.name for file in path.iterdir())
    for pattern, what in _REFUSED.items():
        found = [file.name for file in path.glob(pattern)]
        if found:
            raise ValueError(
                f"{path} holds {what} ({found[0]}), which cannot be put together here: only data"
                " parallel checkpoints of ZeRO can. Export it with the framework that wrote it."
            )
    by_prefix: dict[str, set[int]] = {}
    for name in names:
        match = _OPTIMIZER_FILE.fullmatch(name)
        if match:
            by_prefix.setdefault(match[1], set()).add(int(match[2]))
    if not by_prefix:
        raise _no_optimizer_files(path, names)
    if len(by_prefix) > 1:
        raise ValueError(
            f"{path} holds files of more than one run: their names begin with"
            f" {sorted(prefix + 'zero_pp_rank' for prefix in by_prefix)}. Keep those of one run in"
            " a folder of their own."
        )
    [(prefix, ranks)] = by_prefix.items()
    return Folder(path, prefix, sorted(ranks))


def _tag_folder(directory: Path) -> Path:
    if not directory.exists():
        raise FileNotFoundError(f"there is no folder {directory}")
    if not directory.is_dir():
        raise NotADirectoryError(
            f"{directory} is a file, but a DeepSpeed checkpoint is a folder. If it is a checkpoint"
            " of Lightning, it needs no import."
        )
    latest = directory / LATEST
    if latest.is_file():
        folder = directory / latest.read_text().strip()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{latest} names {folder.name!r}, but there is no such folder in {directory}. Copy"
                " it there, or give the folder with the *_optim_states.pt files."
            )
        return folder
    if not any(directory.glob("*_states.pt")):
        inside = sorted({file.parent.name for file in directory.glob("*/*_states.pt")})
        hint = f" Give one of its folders {inside[:MAX_LISTED]}." if inside else ""
        raise FileNotFoundError(
            f"{directory} is no DeepSpeed checkpoint: it has neither a file {LATEST!r} nor"
            f" *_optim_states.pt.{hint}{_universal_hint(directory)}"
        )
    return directory


def _universal_hint(directory: Path) -> str:
    if (directory / "zero").is_dir() or any(directory.glob("*/zero")):
        return (
            " It looks like a universal checkpoint of DeepSpeed: give the one that it was made of."
        )
    return ""


def _no_optimizer_files(path: Path, names: Sequence[str]) -> Exception:
    if _MODEL_FILE in names:
        return ValueError(
            f"{path} was written without ZeRO (stage 0, or DeepSpeed's plain fp16 or bf16"
            f" optimizer): {_MODEL_FILE} is there, but no zero_pp_rank_*_optim_states.pt. Nothing"
            f" has to be put together: the weights are torch.load({_MODEL_FILE!r})['module']. If"
            " it was ZeRO, copy the ranks' optimizer files there, too."
        )
    return FileNotFoundError(
        f"{path} has no zero_pp_rank_*_optim_states.pt, which hold the ranks' weights and optimizer"
        f" states. Copy them there from all nodes of the run.{_universal_hint(path)}"
    )


def _require(path: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        raise FileNotFoundError(
            f"{path} is not complete: {', '.join(missing[:MAX_LISTED])}{more} missing. Each rank"
            " writes its own file, on its own node: copy all of them into one folder."
        )


# What is in them.


def read(path: Path, is_trusted: bool) -> State:
    """What is in a file; tensors are mapped, not read.

    Args:
        path: The file.
        is_trusted: Make the objects that it names, which can run any code in it. Else each of them
            is a stand-in.

    Raises:
        pickle.UnpicklingError: It holds what not even stand-ins can be made for.
        ValueError: It is damaged, or something else.
    """
    is_zip = zipfile.is_zipfile(path)
    options: dict[str, Any] = {"map_location": "cpu", "mmap": is_zip or None}
    try:
        if is_trusted:
            found = torch.load(path, weights_only=False, pickle_module=_TrustingPickle, **options)
        else:
            known = torch.serialization.get_safe_globals()
            harmless = [kind for kind in HARMLESS if kind not in known]
            with torch.serialization.safe_globals(harmless):
                stand_ins: list[Any] = [(_stand_in(n), n) for n in _unknown(path, is_zip)]
                with torch.serialization.safe_globals(stand_ins):
                    found = torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if is_trusted:
            raise ValueError(f"{path} is damaged: {error}") from error
        raise pickle.UnpicklingError(
            f"{path} cannot be read without running code that it names: {_reason(error)}. Only"
            " if you trust who wrote it, read it as it is (--trust)."
        ) from error
    except (EOFError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or was not written by torch.save; copy it again."
            f" {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not the states of a run")
    return found


def _reason(error: Exception) -> str:
    """What torch did not make, or its own words."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    return named[1] if named else f"{type(error).__name__}: {str(error)[-300:]}"


def _unknown(path: Path, is_zip: bool) -> list[str]:
    """Names in a file that ``torch.load`` does not allow by itself."""
    if is_zip:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    with path.open("rb") as file:  # the format of before torch 1.6, which DeepSpeed still offers
        pairs = [
            str(argument).split(" ")
            for _ in range(_LEGACY_PICKLES)
            for opcode, argument, _ in pickletools.genops(file)
            if opcode.name == "GLOBAL"
        ]
    named = {f"{_RENAMED.get(module, module)}.{name}" for module, name in pairs}
    allowed = {
        kind[1] if isinstance(kind, tuple) else f"{kind.__module__}.{kind.__qualname__}"
        for kind in torch.serialization.get_safe_globals()
    }
    return sorted(named - allowed)  # torch's own come first, whatever we offer


def _stand_in(name: str) -> type[StandIn]:
    return type(name.rpartition(".")[2], (StandIn,), {})


class _Unpickler(pickle.Unpickler):
    """Makes what can be imported, and stand-ins for the rest: DeepSpeed may not be installed."""

    def find_class(self, module: str, name: str) -> Any:
        with suppress(ImportError, AttributeError):
            return super().find_class(module, name)
        return _stand_in(name)


class _TrustingPickle:
    """In place of the module pickle."""

    Unpickler = _Unpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


def holds_stand_in(value: Any) -> bool:
    """Whether an object, or any that it holds, is a stand-in."""
    return any(isinstance(each, StandIn) for each in _walk(value, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _walk(key, seen)
            yield from _walk(each, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _walk(each, seen)
    elif not isinstance(value, (Tensor, type, StandIn)):
        yield from _walk(getattr(value, "__dict__", None), seen)
