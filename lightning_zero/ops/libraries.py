"""The native libraries of this process, and what is slower without them."""

from __future__ import annotations

import torch

from lightning_zero.ops.fakes import register_fakes
from lightning_zero.ops.loader import NativeLibrary
from lightning_zero.ops.sources import HOST

HOST_LIBRARY = NativeLibrary(
    HOST,
    "optimizer steps on the host take several passes over memory instead of one",
    on_load=register_fakes,
)


def is_native(device: torch.device) -> bool:
    """Whether tensors of a device are worked on by native code; tries to build it at first.

    Args:
        device: Where all tensors of a call lie.
    """
    return device.type == "cpu" and HOST_LIBRARY.is_there()
