"""What users ask of parameters that are partitioned: their state, and whole tensors.

Everything here is found by the parameter alone, so it works in any hook of a LightningModule or a
callback, in a bare loop, and does no harm where no engine has the parameter (plain DDP, before and
after training).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_zero.engine import ZeroEngine, engine_of
from lightning_zero.held import Wanted, listed, parameters_in
from lightning_zero.params import units
from lightning_zero.params.bucket import ParamStatus, is_placeholder
from lightning_zero.params.sliced import SlicedParameters, owner_of


def param_status(parameter: nn.Parameter) -> ParamStatus:
    """Whether the full value of a parameter is in memory on this rank now; nothing is fetched.

    Args:
        parameter: Any parameter.

    Returns:
        ``AVAILABLE`` for all that are ordinary tensors, such as those that no engine has.
    """
    engine = engine_of(parameter)
    if engine is None:
        is_away = is_placeholder(parameter)
        return ParamStatus.NOT_AVAILABLE if is_away else ParamStatus.AVAILABLE
    bucket = engine.coordinator.bucket_of(parameter)
    return ParamStatus.AVAILABLE if bucket is None else bucket.status


@contextmanager
def full_params(
    module_or_params: Wanted, writeback: bool = False, from_rank: int | None = None
) -> Iterator[None]:
    """While inside, parameters have their full values, on this rank.

    All ranks enter and leave together. What is written inside is kept on all ranks, or on none:
    not if the ranks have written different values, nor if the block ends with an error. Parameters
    that no engine has are whole as they are, and are left alone.

    Args:
        module_or_params: A module, a parameter, or an iterable of both.
        writeback: Keep what is written; all ranks must write the same values.
        from_rank: Keep what this rank writes; what others write is dropped.

    Raises:
        RuntimeError: Something was written without ``writeback``, or not the same on all ranks
            (which all of them are told), or another rank did not come to the end of the block.
        ValueError: There is no rank ``from_rank``.
    """
    wanted = listed(module_or_params)
    parameters = parameters_in(wanted)
    by_engine: dict[ZeroEngine | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_engine.setdefault(engine_of(parameter), []).append(parameter)
    loose = by_engine.pop(None, [])
    if loose and from_rank is not None:
        raise RuntimeError(
            f"full_params(from_rank={from_rank}): no engine has {len(loose)} of the"
            f" {len(parameters)} parameters, so nobody sends them. Call it while a fit or an"
            " evaluation is running, with parameters of its model."
        )
    with ExitStack() as scopes:
        modules = [each for each in wanted if isinstance(each, nn.Module)]
        for owner, sliced in _sliced(modules, loose).items():
            scopes.enter_context(owner.held(sliced))
        for engine, held in by_engine.items():
            if engine is not None:
                scopes.enter_context(engine.full_params(held, writeback, from_rank))
        yield


def full_grad(parameter: nn.Parameter) -> Tensor | None:
    """The gradient of a parameter, averaged over the ranks, between backward and step.

    What an optimizer would step now: unscaled and clipped if that has been done. For all ranks to
    call together, after backward.

    Args:
        parameter: Any parameter, the same on all ranks.

    Returns:
        A copy of the parameter's shape, in the dtype in which it is stepped (fp32 where there are
        master weights); None where no rank has used the parameter since gradients were cleared.
        ``parameter.grad`` for a parameter that no engine trains.

    Raises:
        RuntimeError: Called in a backward, or for different parameters on different ranks.
    """
    engine = engine_of(parameter)
    return parameter.grad if engine is None else engine.whole.grad(parameter)


def full_optimizer_state(parameter: nn.Parameter, key: str) -> Any:
    """One state that an optimizer keeps of a parameter. For all ranks to call together.

    Args:
        parameter: A parameter of a model that is being trained, the same on all ranks.
        key: Such as ``"exp_avg"`` or ``"step"``; ``"master_weight"`` for the fp32 master weights
            of parameters of lower precision.

    Returns:
        A copy, of the parameter's shape for state with an entry per element; any other state as
        the optimizer has it. None where there is no state yet: before the first step, or for a
        frozen parameter.

    Raises:
        KeyError: The parameter has state, but not of this name.
        RuntimeError: No engine trains the parameter, or ranks ask for different things.
    """
    engine = engine_of(parameter)
    if engine is None:
        raise RuntimeError(
            "full_optimizer_state() needs an engine that trains the parameter: call it while a fit"
            " is running. Elsewhere the state is optimizer.state[parameter]."
        )
    return engine.whole.state(parameter, key)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module's forward reads a parameter that is not its own.

    At stage 3 the parameter then comes with those of the module. Without it the first step fetches
    it when it is read, and later steps know. To be called before training, in ``__init__``,
    ``setup`` or ``configure_model``. A copy of a module (``deepcopy``, a process that was spawned)
    is not registered.

    Args:
        module: Runs a forward that reads the parameter.
        parameter: Belongs to another module of the model.

    Raises:
        TypeError: It is not a module, or not a parameter.
        ValueError: The module has no forward.
        RuntimeError: Training has begun.
    """
    _check_registration("register_external_parameter", module, parameter)
    units.register_external_parameter(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back :func:`register_external_parameter`.

    Raises:
        TypeError: It is not a module, or not a parameter.
        ValueError: It was not registered.
        RuntimeError: Training has begun.
    """
    _check_registration("unregister_external_parameter", module, parameter)
    units.unregister_external_parameter(module, parameter)


def _check_registration(what: str, module: nn.Module, parameter: nn.Parameter) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"{what} takes a module and a parameter, got {type(module).__name__} and"
            f" {type(parameter).__name__}"
        )
    if engine_of(parameter) is not None:
        raise RuntimeError(
            f"{what} has no effect while the model is trained or evaluated: call it before, in"
            " __init__, setup or configure_model"
        )


def _sliced(
    modules: Iterable[nn.Module], loose: Iterable[nn.Parameter]
) -> dict[SlicedParameters, list[nn.Parameter]]:
    """Parameters that are spread over the ranks while no engine has them, by their owner."""
    found: dict[SlicedParameters, list[nn.Parameter]] = {}
    for module in modules:
        owner = owner_of(module)
        if owner is not None:
            held = [parameter for parameter in parameters_in(module) if owner.holds(parameter)]
            found.setdefault(owner, []).extend(held)
    known = {parameter for held in found.values() for parameter in held}
    lost = [tuple(p.shape) for p in loose if p not in known and is_placeholder(p)]
    if lost:
        raise RuntimeError(
            f"full_params(): nobody has the values of {len(lost)} parameter(s) (shapes"
            f" {lost[:5]}). If the model is sharded and not trained now, give the module, not its"
            " parameters. If its training has failed, load a checkpoint into a new model."
        )
    return found
