"""Text as bytes: files of a folder, cut into windows for training and validation."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
)


def find_files(path: str | None) -> list[Path]:
    """List the files to read.

    Args:
        path: A file, a folder (read recursively), or ``None`` for the Python sources of the
            standard library of the running interpreter, without its tests.

    Returns:
        Files in a fixed order.

    Raises:
        FileNotFoundError: ``path`` does not exist or holds no file.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = sorted(root.rglob("*.py"))
        files = [f for f in found if not SKIPPED_FOLDERS & set(f.relative_to(root).parts[:-1])]
    else:
        root = Path(path)
        found = sorted(root.rglob("*")) if root.is_dir() else [root]
        files = [f for f in found if f.is_file() and not f.name.startswith(".")]
    if not files:
        raise FileNotFoundError(
            f"data.path={str(root)!r}: no such text file, or a folder without files"
        )
    return files


def read_split(files: list[Path], validation_fraction: float) -> tuple[bytes, bytes]:
    """Read the files and hold some of the text out.

    Whole files are held out where there are many, the end of the text where there are few.

    Args:
        files: Files to read; binary ones (with a NUL byte) are skipped.
        validation_fraction: Part to hold out, between 0 and 1.

    Returns:
        Text for training and text for validation.
    """
    texts = [text for text in (file.read_bytes() for file in files) if b"\0" not in text]
    every = round(1 / validation_fraction)
    if len(texts) < 2 * every:
        whole = b"\n".join(texts)
        cut = round(len(whole) * (1 - validation_fraction))
        return whole[:cut], whole[cut:]
    held_out = b"\n".join(texts[every - 1 :: every])
    return b"\n".join(t for i, t in enumerate(texts) if i % every != every - 1), held_out


class Windows(Dataset[Tensor]):
    """Windows of ``context + 1`` bytes that share their border byte: inputs and targets in one.

    Args:
        text: The text; what does not fill the last window is dropped.
        context: Bytes the model sees.

    Raises:
        ValueError: The text is shorter than one window.
    """

    def __init__(self, text: bytes, context: int) -> None:
        if len(text) <= context:
            raise ValueError(
                f"{len(text)} bytes of text are less than a window of {context + 1} bytes"
            )
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # 1-D
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        """Return one window, [T + 1] int64."""
        start = index * self._context
        return self._text[start : start + self._context + 1].long()


class TextData(L.LightningDataModule):
    """Text for training and validation.

    Args:
        path: See :func:`find_files`.
        validation_fraction: Part of the text held out.
        batch: Windows per rank and forward.
        context: Bytes the model sees.
    """

    def __init__(
        self, path: str | None, validation_fraction: float, batch: int, context: int
    ) -> None:
        super().__init__()
        self._batch, self._context = batch, context
        self._path, self._validation_fraction = path, validation_fraction

    def setup(self, stage: str) -> None:
        """Read the text (on every rank)."""
        train, validation = read_split(find_files(self._path), self._validation_fraction)
        self._train = Windows(train, self._context)
        self._validation = Windows(validation, self._context)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Serve shuffled windows; the Trainer gives each rank its own."""
        return DataLoader(self._train, self._batch, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Serve windows in one fixed random order, so that a few batches see many files."""
        order = torch.randperm(len(self._validation), generator=torch.Generator().manual_seed(0))
        return DataLoader(Subset(self._validation, order.tolist()), self._batch)
