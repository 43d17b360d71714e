"""The native libraries of this process, and what is slower without them."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_zero.ops.build import build
from lightning_zero.ops.fakes import register_fakes
from lightning_zero.ops.loader import NativeLibrary
from lightning_zero.ops.sources import DEVICE, HOST

HOST_LIBRARY = NativeLibrary(
    HOST,
    "steps, quantisation and norms on the host take several passes over memory instead of one",
    on_load=register_fakes,
)
DEVICE_LIBRARY = NativeLibrary(
    DEVICE,
    "steps, quantisation and norms on the device take several kernels instead of one",
    on_load=lambda: None,
)


def is_native(device: torch.device) -> bool:
    """Whether tensors of a device are worked on by native code; tries to build it at first.

    The schemas stand in the host's library: without it there is none for devices either.

    Args:
        device: Where all tensors of a call lie.
    """
    if device.type == "cpu":
        return HOST_LIBRARY.is_there()
    if device.type == "cuda":
        return HOST_LIBRARY.is_there() and DEVICE_LIBRARY.is_there()
    return False


def build_all() -> list[Path]:
    """Build what this machine can use: the host's library, and one for its CUDA devices if any.

    Returns:
        Files of the libraries.

    Raises:
        BuildError: One cannot be built; says why and what to do.
    """
    return [build(HOST), *([build(DEVICE)] if torch.cuda.is_available() else [])]
