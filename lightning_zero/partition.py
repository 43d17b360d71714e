"""Cuts a module into buckets: what can be partitioned, the plan, and the storage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.comm import ShardGroups, ShardReads
from lightning_zero.config import ZeroOptions
from lightning_zero.memory.room import fits_everywhere
from lightning_zero.optim import geometry
from lightning_zero.optim.pieces import parameters_of
from lightning_zero.params.bucket import ParameterBucket, is_placeholder
from lightning_zero.params.construction import sharded_construction
from lightning_zero.params.meta import materialize
from lightning_zero.params.shard_homes import MakeHome
from lightning_zero.params.sliced import SlicedParameters, owner_of
from lightning_zero.params.units import Unit, module_units
from lightning_zero.params.values import WHOLE, Values
from lightning_zero.plan.layout import ParameterSpec, default_bucket_numel, plan_buckets

ALIGN_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Partition:
    """A module whose parameters lie in buckets."""

    units: list[Unit]
    """Subtrees of the module whose parameters travel together."""

    buckets: list[ParameterBucket]
    """All buckets of parameters in model order, frozen ones (stage 3) included."""

    slices: SlicedParameters | None = None
    """Owner of the slices of a model that was constructed sharded."""

    def trainable(self) -> list[ParameterBucket]:
        """The buckets whose parameters are trained."""
        return [bucket for bucket in self.buckets if bucket.parameters[0].requires_grad]


def check_model(
    module: nn.Module, optimizers: Sequence[Optimizer], options: ZeroOptions, world_size: int
) -> None:
    """Refuse what cannot be partitioned, or would train something else than on one device.

    Args:
        module: The whole model.
        optimizers: The user's optimizers.
        options: What to shard.
        world_size: Ranks over which states would be sharded.

    Raises:
        ValueError: An optimizer or a parameter cannot be used.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    check_optimizers(optimizers, names, options, world_size)
    for parameter, name in names.items():
        _check_parameter(parameter, name)


def check_newcomers(
    found: Mapping[nn.Parameter, str],
    known: Collection[nn.Parameter],
    optimizers: Sequence[Optimizer],
    options: ZeroOptions,
    world_size: int,
) -> None:
    """As :func:`check_model`, for a model that has changed.

    Args:
        found: New parameters of the model, by name.
        known: All parameters that are or were of the model.
        optimizers: The user's optimizers.
        options: What to shard.
        world_size: Ranks over which states would be sharded.

    Raises:
        ValueError: An optimizer or a parameter cannot be used.
    """
    for parameter, name in found.items():
        _check_parameter(parameter, name)
    check_optimizers(optimizers, known, options, world_size)


def check_optimizers(
    optimizers: Sequence[Optimizer],
    known: Collection[nn.Parameter],
    options: ZeroOptions,
    world_size: int,
) -> None:
    """Refuse optimizers that would train something else than on one device.

    Args:
        optimizers: The user's optimizers.
        known: Parameters of the model.
        options: What to shard.
        world_size: Ranks over which states would be sharded.

    Raises:
        ValueError: One of them cannot be used.
    """
    is_cut = world_size > 1 and options.policy.shards_optimizer
    for optimizer in optimizers:
        geometry.check_optimizer(optimizer, options.shard_by if is_cut else "none")
        strangers = [tuple(p.shape) for p in parameters_of(optimizer) if p not in known]
        if strangers:
            raise ValueError(
                f"{type(optimizer).__name__} holds {len(strangers)} parameter(s) that are not in"
                f" the model (shapes {strangers[:5]}): they would never be averaged over the ranks."
                " Register them in the model."
            )


def _check_parameter(parameter: nn.Parameter, name: str) -> None:
    if isinstance(parameter, nn.UninitializedParameter):
        raise ValueError(
            f"{name!r} has no shape yet (a lazy module): run a dummy batch in `setup` or"
            " `configure_model`, so that it can be partitioned"
        )
    if parameter.is_complex():
        raise ValueError(
            f"{name!r} is complex ({parameter.dtype}), which ZeroStrategy cannot partition:"
            " store it as a real tensor (torch.view_as_real) or use strategy='ddp'"
        )


def partition(
    module: nn.Module,
    options: ZeroOptions,
    groups: ShardGroups,
    shards: ShardReads,
    make_home: MakeHome | None = None,
) -> Partition:
    """Lay the parameters of a module into buckets; they become views of them.

    At stages below 3 frozen parameters stay outside: they have no gradient and no state.

    Args:
        module: The whole model, equal on all ranks.
        options: What to shard.
        groups: Collectives over the ranks that share the states.
        shards: Brings the shards of buckets together that come and go.
        make_home: Makes the place where their shards live, if that is not on the device.
    """
    policy = options.policy
    slices = owner_of(module)
    values: Values = WHOLE
    if slices is not None:
        slices.rest()
        values = slices
    wanted = {p for p in module.parameters() if p.requires_grad or policy.shards_parameters}
    units, buckets = _lay_out(module, wanted, options, groups, shards, values, make_home)
    if slices is not None:
        slices.restore(p for p in module.parameters() if slices.holds(p))
        slices.unwatch(module.modules())
    return Partition(units, buckets, slices)


def grow(
    module: nn.Module,
    wanted: Collection[nn.Parameter],
    options: ZeroOptions,
    groups: ShardGroups,
    shards: ShardReads,
    make_home: MakeHome | None,
    first_index: int,
) -> tuple[list[Unit], list[ParameterBucket]]:
    """Lay parameters into buckets of their own, in a module that has been partitioned before.

    Args:
        module: The whole model as it is now.
        wanted: Parameters of it that are in no bucket, whole and equal on all ranks.
        options: What to shard.
        groups: Collectives over the ranks that share the states.
        shards: Brings the shards of buckets together that come and go.
        make_home: Makes the place where their shards live, if that is not on the device.
        first_index: Index of the first new bucket.

    Returns:
        Units of the whole model, and the new buckets.
    """
    return _lay_out(module, wanted, options, groups, shards, WHOLE, make_home, first_index)


def _lay_out(
    module: nn.Module,
    wanted: Collection[nn.Parameter],
    options: ZeroOptions,
    groups: ShardGroups,
    shards: ShardReads,
    values: Values,
    make_home: MakeHome | None,
    first_index: int = 0,
) -> tuple[list[Unit], list[ParameterBucket]]:
    """Units of the whole module, and buckets of the parameters that are wanted."""
    policy = options.policy
    total_numel = sum(
        p.numel() for p in module.parameters() if p.requires_grad or policy.shards_parameters
    )
    bucket_numel = options.bucket_numel or default_bucket_numel(total_numel)
    units = module_units(
        module, bucket_numel, options.leaf_modules, _compat.compiled_modules(module)
    )
    persistent = _persistent(module, options)
    found = {
        fqn: (index, parameter)
        for index, unit in enumerate(units)
        for fqn, parameter in unit.parameters
        if parameter in wanted
    }
    item_nbytes = min((parameter.element_size() for parameter in wanted), default=4)
    layouts = plan_buckets(
        [
            _spec(fqn, parameter, values.stride(parameter), index, parameter in persistent)
            for fqn, (index, parameter) in found.items()
        ],
        world_size=groups.world_size if policy.shards_optimizer else 1,
        bucket_numel=bucket_numel,
        align_numel=ALIGN_NBYTES // item_nbytes,
        shard_by=options.shard_by,
        first_index=first_index,
    )
    buckets = []
    for layout in layouts:
        parameters = [found[slot.fqn][1] for slot in layout.slots]
        is_resident = not policy.shards_parameters or parameters[0] in persistent
        gathers = groups.parameters if is_resident else shards
        where = is_resident, values, make_home
        buckets.append(ParameterBucket(layout, parameters, gathers, *where))
    return units, buckets


@contextmanager
def construction(
    module: nn.Module | None, options: ZeroOptions, groups: ShardGroups, device: torch.device
) -> Iterator[None]:
    """While inside, parts of a model are built: sharded at once where parameters are to be sharded.

    Args:
        module: The model; None if there is none that could be sharded.
        options: What is to be sharded.
        groups: Collectives over the ranks that share the states.
        device: Where the model is to be trained.
    """
    if module is None:
        yield
    elif options.policy.shards_parameters and groups.world_size > 1:
        with sharded_construction(module, groups.control, device, options.bucket_numel):
            yield
    else:
        yield
        materialize(module, device)


@contextmanager
def construction_of_any(
    options: ZeroOptions, groups: ShardGroups, device: torch.device
) -> Iterator[None]:
    """While inside, whole models are built, any number; as :func:`construction`."""
    if options.policy.shards_parameters and groups.world_size > 1:
        with sharded_construction(None, groups.control, device, options.bucket_numel):
            yield
    else:
        yield


def fits_whole(buckets: Sequence[ParameterBucket], groups: ShardGroups) -> bool:
    """Whether each rank has the memory to hold all parameters of these buckets, with some to spare.

    To be called on all ranks, which give the same answer.
    """
    nbytes = sum(bucket.layout.padded_numel * bucket.dtype.itemsize for bucket in buckets)
    device = buckets[0].flat.device if buckets else torch.device("cpu")
    return fits_everywhere(2 * nbytes, device, groups.control)


def broadcast_module(module: nn.Module, groups: ShardGroups) -> None:
    """Give all ranks the parameters and buffers of rank 0, but for sliced parameters.

    Raises:
        RuntimeError: A parameter has lost its values in an earlier error.
    """
    slices = owner_of(module)
    tensors = []
    for name, parameter in module.named_parameters():
        if slices is not None and slices.holds(parameter):
            continue  # equal since it was constructed
        if is_placeholder(parameter):  # it could not be written to
            raise RuntimeError(
                f"{name!r} has no values: training of this model ended with an error, or its"
                " construction did, while its parameters were sharded over the ranks. Make the"
                " model anew, or load a checkpoint into a new one."
            )
        tensors.append(parameter.data)
    groups.control.broadcast(tensors + [buffer.data for buffer in module.buffers()])


def _persistent(module: nn.Module, options: ZeroOptions) -> set[nn.Parameter]:
    """Small parameters that stay in memory at stage 3, in model order up to the total."""
    if not options.policy.shards_parameters:
        return set()
    prefetch = options.prefetch_options
    total_numel = prefetch.persistent_total_numel
    found: set[nn.Parameter] = set()
    held_numel = 0
    for parameter in module.parameters():
        numel = parameter.numel()
        if not 0 < numel <= prefetch.persistent_numel:
            continue
        if total_numel is None or held_numel + numel <= total_numel:
            found.add(parameter)
            held_numel += numel
    return found


def _spec(
    fqn: str, parameter: nn.Parameter, stride: tuple[int, ...], unit: int, is_persistent: bool
) -> ParameterSpec:
    kind = (parameter.dtype, parameter.device, parameter.requires_grad, is_persistent)
    return ParameterSpec(fqn, tuple(parameter.shape), stride, kind, unit)
