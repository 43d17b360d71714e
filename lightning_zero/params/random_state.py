"""The same random numbers on all ranks."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_zero.comm import Collectives

_Generator = tuple[Callable[[], Any], Callable[[Any], None]]


@contextmanager
def same_random_numbers(collectives: Collectives, device: torch.device) -> Iterator[None]:
    """While inside, every rank draws the random numbers of rank 0; for all ranks to enter.

    A generator that stood where that of rank 0 stood goes on from where it is then, so that what
    follows is as without other ranks. Others get their own state back at the end.

    Args:
        collectives: Group of the ranks.
        device: Accelerator whose generator counts, too.
    """
    generators = _generators(device)
    own = {name: pickle.dumps(get()) for name, (get, _) in generators.items()}
    first = _of_first_rank(own, collectives, device)
    others = {name for name in own if name in first and first[name] != own[name]}
    for name in others:
        generators[name][1](pickle.loads(first[name]))
    try:
        yield
    finally:
        for name in others:
            generators[name][1](pickle.loads(own[name]))


def _of_first_rank(
    own: dict[str, bytes], collectives: Collectives, device: torch.device
) -> dict[str, bytes]:
    """What rank 0 has, sent once and not by every rank to every other one."""
    place = torch.device("cpu") if collectives.is_host_side else device
    message = pickle.dumps(own) if collectives.rank == 0 else b""
    length = torch.tensor([float(len(message))], dtype=torch.float64, device=place)
    collectives.agree(length)
    wire = torch.zeros(int(length), dtype=torch.uint8, device=place)
    if message:
        wire.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    collectives.broadcast([wire])
    found: dict[str, bytes] = pickle.loads(bytes(wire.tolist()))
    return found


def _generators(device: torch.device) -> dict[str, _Generator]:
    """How the state of each generator in use is read and set."""
    found: dict[str, _Generator] = {
        "python": (random.getstate, random.setstate),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if device.type != "cpu":
        accelerator: Any = torch.get_device_module(device)
        found["accelerator"] = (
            lambda: accelerator.get_rng_state(device),
            lambda state: accelerator.set_rng_state(state, device),
        )
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = (numpy.random.get_state, numpy.random.set_state)
    return found
