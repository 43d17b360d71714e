"""Building a model whose parameters are sharded as they come into being.

[Note: construction]
torch tells of every parameter that a module registers, and of every tensor that is about to be
made (``TorchFunctionMode``). That is enough: before a new tensor needs memory, the parameters of
modules that were not used last are cut (``params.sliced``), and whoever reads one again gets it
whole. No class of torch or of the user is changed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lightning_zero.comm import Collectives
from lightning_zero.memory.host import large_blocks_apart
from lightning_zero.params.bucket import explain_refused_write
from lightning_zero.params.meta import materialize
from lightning_zero.params.random_state import same_random_numbers
from lightning_zero.params.slice_transfers import SliceTransfers
from lightning_zero.params.sliced import SlicedParameters, owner_of

OTHERS_SETTINGS = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""While a model is built: transformers reads weights one after the other, instead of all ahead."""
WRITE_WHEN_USED = (
    "If this was a parameter: while a model is built at stage 3, values are only there while a"
    " parameter is used. Read it from its module right before you write to it (module.weight, or a"
    " loop over module.parameters()), not from a list that was made before."
)


@contextmanager
def sharded_construction(
    root: nn.Module | None,
    collectives: Collectives,
    device: torch.device,
    bucket_numel: int | None,
) -> Iterator[None]:
    """While inside, a model is built of which every rank keeps its part; for all ranks to enter.

    What is made inside has the values that one rank alone would give it, and no rank ever holds
    more than its part and the largest bucket. The parameters are objects of true shape that read as
    NaN after it, until an engine lays them into buckets.

    Args:
        root: The model, of which some modules may be there already; these stay whole. None where
            models are made inside: any number, of which nothing is given up at the end.
        collectives: Group over which parameters are sharded.
        device: Where the model is to be trained.
        bucket_numel: Capacity of a bucket in elements; None for the default of the model's size.

    Raises:
        RuntimeError: The ranks did not build the same model, or a module on the meta device cannot
            initialize itself.
    """
    owner = None if root is None else owner_of(root)
    owner = owner or SlicedParameters(SliceTransfers(collectives, device), bucket_numel)
    if owner.is_open:
        yield
        return
    try:
        with same_random_numbers(collectives, device), owner.opened():
            with large_blocks_apart(), _watched(owner), _settings(OTHERS_SETTINGS):
                yield
                if root is not None:
                    materialize(root, device, owner.watch)
            owner.transfers.meet("end of construction")
        _check_equal(owner, _alive(owner) if root is None else dict(root.named_parameters()))
        if root is not None:
            _give_up_strangers(owner, root)
    except BaseException as error:
        owner.unwatch()
        owner.unwatch(() if root is None else root.modules())
        explain_refused_write(error, WRITE_WHEN_USED)
        raise


def _check_equal(owner: SlicedParameters, parameters: dict[str, nn.Parameter]) -> None:
    built = {
        f"{name} {tuple(known.shape)}": known
        for name, parameter in parameters.items()
        if (known := owner.known(parameter)) is not None
    }
    different = owner.transfers.compare({name: known.digest for name, known in built.items()})
    different += [name for name, known in built.items() if not known.is_agreed]
    if different:
        raise RuntimeError(
            f"{len(different)} parameter(s) were not built from the same values on all ranks, first"
            f" {different[:3]}: sharded construction needs every rank to run the same code with"
            " the same random numbers. Do not make values depend on the rank, on a seed set per"
            " rank, or on a generator of your own; or build the model in __init__, where the values"
            " of rank 0 are taken."
        )


def _alive(owner: SlicedParameters) -> dict[str, nn.Parameter]:
    """All parameters that were built and are still there, under names for errors."""
    found = owner.parameters
    alive = owner.transfers.on_all_ranks(found)  # the rest is garbage that is collected some time
    labels = {n: known.label for n in alive if (known := owner.known(found[n])) is not None}
    return {f"{labels[n]}, number {n}": found[n] for n in sorted(labels)}


def _give_up_strangers(owner: SlicedParameters, root: nn.Module) -> None:
    """Make whole what was built and is not in the model, and leave it to its holder."""
    kept = set(root.parameters())
    others = {serial: p for serial, p in owner.parameters.items() if p not in kept}
    alive = owner.transfers.on_all_ranks(others)  # the rest is garbage that is collected some time
    owner.restore(others[serial] for serial in sorted(alive))


@contextmanager
def _watched(owner: SlicedParameters) -> Iterator[None]:
    """See every parameter that is registered anywhere, and make room for every new tensor."""

    def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        owner.watch(module)

    handle = register_module_parameter_registration_hook(registered)
    try:
        with _RoomForTensors(owner.make_room):
            yield
    finally:
        handle.remove()


class _RoomForTensors(TorchFunctionMode):
    """Tells how many elements a tensor has, before it is made."""

    def __init__(self, make_room: Callable[[int], None]) -> None:
        super().__init__()
        self._make_room = make_room

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        numel = incoming_numel(func, args, kwargs)
        if numel:
            self._make_room(numel)
        made = func(*args, **kwargs)
        if numel and func in _EMPTY:  # memory without values would differ from rank to rank
            made.detach().zero_()
        return made


_SIZED = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn})
_EMPTY = frozenset({torch.empty, torch.empty_like})
_FILLED = frozenset({torch.full})
_LIKE = frozenset(
    {
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        torch.randn_like,
        torch.full_like,
        torch.clone,
        Tensor.clone,
    }
)


def incoming_numel(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Elements of the tensor that a call will make; 0 where no memory is needed or it is unknown.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return 0
    if func in _LIKE:
        model = args[0] if args else kwargs.get("input")
        is_real = isinstance(model, Tensor) and not (model.is_meta and device is None)
        return model.numel() if isinstance(model, Tensor) and is_real else 0
    if func in _SIZED:
        size = kwargs.get("size", args)
    elif func in _FILLED:
        size = kwargs.get("size", args[:1])
    else:
        return 0
    if len(size) == 1 and not isinstance(size[0], int):
        size = size[0]
    return math.prod(size) if all(isinstance(length, int) for length in size) else 0


@contextmanager
def _settings(wanted: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment that the user has not set."""
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
