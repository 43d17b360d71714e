"""One ordinary file from a sharded checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint import sharded
from lightning_zero.checkpoint.files import replacing, save_file
from lightning_zero.checkpoint.stored import loaded


def consolidate(folder: Path, file: Path, weights_only: bool | None = None) -> None:
    """Write the ordinary checkpoint of one file that a sharded one stands for.

    A name that ends with ``.safetensors`` gets the weights and buffers alone; tied ones are written
    under the first of their names, and told in the file's metadata.

    Args:
        folder: The sharded checkpoint.
        file: The file, new or to be replaced.
        weights_only: False to make any object that the checkpoint names; only if it is trusted.

    Raises:
        RuntimeError: The folder is no complete checkpoint, or is damaged.
        ImportError: The package safetensors is not installed.
    """
    problem = sharded.check(folder)
    if problem:
        raise RuntimeError(problem)
    checkpoint = sharded.open_folder(folder, weights_only)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".safetensors":
        _save_safetensors(checkpoint["state_dict"], file)
        return
    save_file(loaded(checkpoint), file)


def _save_safetensors(state: dict[str, Any], file: Path) -> None:
    try:
        from safetensors.torch import save_file as save_tensors
    except ImportError as error:
        raise ImportError(
            f"{file} needs the package safetensors: pip install safetensors, or choose a name that"
            " does not end with .safetensors"
        ) from error
    first_names: dict[Any, str] = {}
    tensors, tied = {}, {}
    for name, value in state.items():
        key = getattr(value, "key", name)
        if key in first_names:
            tied[name] = first_names[key]
        elif isinstance(value, torch.Tensor) or key != name:
            first_names[key] = name
            full = value if isinstance(value, torch.Tensor) else value.full()
            tensors[name] = full.contiguous()
    with replacing(file) as part:
        save_tensors(tensors, part, metadata={"format": "pt", **tied})
