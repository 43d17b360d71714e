"""Which optimizers may be stepped on slices of a parameter.

An element-wise optimizer changes each element from that element's own gradient and state, so
stepping slices gives the same numbers. Others (whole-tensor norms, matrix factors, closures called
several times) do not, and are never stepped on slices without a word.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optim.apart import trial_twin

ELEMENTWISE = frozenset(
    [
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ]
)
"""Optimizers of torch.optim that are element-wise."""

WHOLE_TENSOR = frozenset(
    [
        "Adafactor",
        "AdaFactor",
        "CAME",
        "DistributedShampoo",
        "LAMB",
        "LARS",
        "Lamb",
        "Lars",
        "Muon",
        "NovoGrad",
        "SM3",
        "SOAP",
        "Shampoo",
    ]
)
"""Optimizers, by class name, that need whole matrices or norms of whole tensors."""

UNSUPPORTED = {
    "LBFGS": "it evaluates its closure several times per step, and gradients are averaged over the"
    " ranks once per step",
    "SparseAdam": "it takes sparse gradients only, and gradients travel in dense buckets",
}


def check_optimizer(optimizer: Optimizer, shard_by: str) -> None:
    """Refuse an optimizer that would train something else than it does on one device.

    Args:
        optimizer: The user's optimizer, not stepped yet.
        shard_by: ``"element"``, ``"tensor"``, or ``"none"`` if every rank steps whole parameters.

    Raises:
        ValueError: The optimizer cannot be used, or not with this sharding.
    """
    name = type(optimizer).__name__
    if name in UNSUPPORTED:
        raise ValueError(
            f"ZeroStrategy cannot train with {name}: {UNSUPPORTED[name]}."
            " Use another optimizer, or Lightning's `strategy='ddp'`."
        )
    if _requires_closure(optimizer):
        raise ValueError(
            f"ZeroStrategy cannot train with {name}: its `step` requires a closure, but the closure"
            " runs before the step. Give `closure` the default None in `step`."
        )
    if shard_by == "element" and not is_elementwise(optimizer):
        raise ValueError(
            f"{name} needs whole parameters (norms or matrices), but shard_by='element' gives it"
            " slices of them. Use ZeroStrategy(..., shard_by='tensor'), which places every"
            " parameter whole on one rank."
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether stepping slices of a parameter equals stepping the whole parameter.

    Known classes are looked up; any other is tried on a small matrix, whole against sliced.
    """
    kind = type(optimizer)
    if kind.__name__ in WHOLE_TENSOR:
        return False
    if kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE:
        return True
    if any(base.__name__ in WHOLE_TENSOR for base in kind.__mro__):
        return False
    try:
        return _steps_slices_alike(optimizer)
    except Exception:  # it cannot even step a slice
        return False


def state_nbytes_per_element(
    optimizer: Optimizer, options: dict[str, Any], dtype: torch.dtype
) -> float | None:
    """Bytes of state that an optimizer is going to have for each element of a parameter.

    Args: as for :func:`elementwise_states`.

    Returns:
        None where that depends on the shape of the parameter, or the trial fails.
    """
    states = elementwise_states(optimizer, options, dtype)
    return None if states is None else float(sum(kind.itemsize for kind in states.values()))


def elementwise_states(
    optimizer: Optimizer, options: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.dtype] | None:
    """Names and dtypes of the states that an optimizer is going to have for each element.

    Args:
        optimizer: The optimizer; a twin of it is tried on a small matrix.
        options: The options of one of its groups.
        dtype: Dtype of what it steps.

    Returns:
        None where that depends on the shape of the parameter, or the trial fails.
    """
    weight = nn.Parameter(torch.ones(4, 6, dtype=dtype))
    try:
        twin = trial_twin(optimizer, options, [weight])
        weight.grad = torch.ones_like(weight)
        twin.step()
        every = twin.state[weight].items() if weight in twin.state else ()
        states = {key: v for key, v in every if isinstance(v, Tensor) and v.dim()}
    except Exception:  # what it has is seen when it has stepped
        return None
    if any(state.shape != weight.shape for state in states.values()):
        return None
    return {key: state.dtype for key, state in states.items()}


def _requires_closure(optimizer: Optimizer) -> bool:
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())
    closure = next((p for p in parameters if p.name == "closure"), None)
    return closure is not None and closure.default is inspect.Parameter.empty


def _steps_slices_alike(optimizer: Optimizer) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, generator=generator)
    grads = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    for options in optimizer.param_groups:
        whole = nn.Parameter(weight.clone())
        slices = [nn.Parameter(part.clone()) for part in torch.split(weight.flatten(), [7, 17])]
        on_whole, on_slices = (
            trial_twin(optimizer, options, [whole]),
            trial_twin(optimizer, options, slices),
        )
        for grad in grads:
            whole.grad = grad.clone()
            for part, part_grad in zip(slices, torch.split(grad.flatten(), [7, 17]), strict=True):
                part.grad = part_grad.clone()
            on_whole.step()
            on_slices.step()
        joined = torch.cat([part.detach() for part in slices])
        if not torch.allclose(whole.detach().flatten(), joined, rtol=1e-6, atol=1e-7):
            return False
    return True
