"""How torch.distributed.checkpoint writes and reads parts of 1-D tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from lightning_zero.checkpoint.stored import Part, StoredTensor

METADATA_FILE = ".metadata"
"""Where torch.distributed.checkpoint keeps which file holds what."""

_METADATA_NAMES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PureWindowsPath"),
}


class PartSavePlanner(DefaultSavePlanner):
    """Writes this rank's parts; in the files every tensor is 1-D, in dense memory order.

    Args:
        parts: In host memory.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {(part.tensor.key, part.offset): part for part in parts}

    def create_local_plan(self) -> SavePlan:
        """See the base class."""
        self.plan = SavePlan([_write_item(part) for part in self._parts.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """See the base class."""
        offset = write_item.index.offset
        if offset is None:
            raise AssertionError(f"{write_item.index.fqn} is no part")
        return self._parts[write_item.index.fqn, offset[0]].values


class PartReader:
    """Reads runs of elements from the files of torch.distributed.checkpoint.

    Args:
        folder: Where the files are.

    Raises:
        RuntimeError: The list of tensors is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._storage = FileSystemReader(folder)
        self._metadata = read_metadata(folder)
        self._storage.set_up_storage_reader(self._metadata, is_coordinator=True)

    def __call__(self, tensor: StoredTensor, out: Tensor, begin: int) -> None:
        """Fill a 1-D tensor with elements from ``begin`` on.

        Raises:
            RuntimeError: The files hold no such tensor, or not all of its elements.
        """
        found = self._metadata.state_dict_metadata.get(tensor.key)
        if not isinstance(found, TensorStorageMetadata):
            raise RuntimeError(f"{self._storage.path} holds no tensor {tensor.key!r}")
        items = _read_items(tensor.key, found.chunks, begin, begin + out.numel())
        if sum(item.lengths[0] for item in items) != out.numel():
            raise RuntimeError(f"{self._storage.path} holds {tensor.key!r} only in part")
        self._storage.read_data(LoadPlan(items), _Landing(out)).wait()


class _Landing(LoadPlanner):
    """Where read elements go."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        first = read_item.dest_offsets[0]
        return self._out[first : first + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """What was read is in place."""


def _write_item(part: Part) -> WriteItem:
    offsets, sizes = torch.Size([part.offset]), torch.Size([part.values.numel()])
    return WriteItem(
        index=MetadataIndex(part.tensor.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=part.values.dtype),
            size=torch.Size([part.tensor.numel]),
        ),
    )


def _read_items(
    key: str, chunks: Sequence[ChunkStorageMetadata], begin: int, end: int
) -> list[ReadItem]:
    items = []
    for number, chunk in enumerate(chunks):
        offset, numel = chunk.offsets[0], chunk.sizes[0]
        first, last = max(begin, offset), min(end, offset + numel)
        if first < last:
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(key),
                    dest_offsets=torch.Size([first - begin]),
                    storage_index=MetadataIndex(key, chunk.offsets, number),
                    storage_offsets=torch.Size([first - offset]),
                    lengths=torch.Size([last - first]),
                )
            )
    return items


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of torch's metadata, and nothing else: a checkpoint must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("pathlib._local", "pathlib")  # where Python 3.13 has them
        if (module, name) in _METADATA_NAMES or _is_torch_constant(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


def _is_torch_constant(module: str, name: str) -> bool:
    return module == "torch" and isinstance(
        getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
    )


def read_metadata(folder: Path) -> Metadata:
    """The list of tensors in a folder.

    Raises:
        RuntimeError: It is damaged, or holds what does not belong there.
    """
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise RuntimeError(f"{path} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise RuntimeError(f"{path} is no list of tensors")
    return metadata
