"""Steps of a part of what an optimizer steps, by a twin of it.

[Note: steps apart]
States that leave the device are stepped bucket by bucket, so that one bucket travels while the next
is stepped. That is the same as one step of all if the optimizer treats each parameter by itself,
and keeps nothing but the options in its groups. Those of ``torch.optim`` do; of any other a trial
tells. One that does not is stepped as a whole.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FUSED_ON_HOST = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Classes whose fused form runs on a CPU: one pass over memory instead of ten."""
CHOICES = ("fused", "foreach", "capturable", "differentiable")
"""Options by which a user chooses a form; none chosen is the fastest."""


def twin_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the same settings, and no hooks or schedulers of its own.

    Its groups and its state are the user's until they are replaced.
    """
    twin = copy.copy(optimizer)
    for name, value in vars(optimizer).items():  # a copy of an optimizer loses its own attributes
        is_replaced_method = callable(value) and hasattr(type(optimizer), name)
        if not is_replaced_method:  # by a scheduler: it would step the user's optimizer
            vars(twin).setdefault(name, value)
    return twin


class ApartSteps:
    """Steps tensors of an optimizer, some at a time, within one step of it.

    Args:
        optimizer: The user's optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._twin = twin_of(optimizer)
        self._has_fused = type(optimizer) in FUSED_ON_HOST

    def step(
        self,
        group: Mapping[str, Any],
        tensors: Sequence[tuple[Tensor, MutableMapping[str, Any]]],
    ) -> None:
        """Step tensors that have their gradients.

        Args:
            group: The user's group that they belong to.
            tensors: What to step, all on one device, each with its state, which is written to.
        """
        weights = [weight for weight, _ in tensors]
        options = {**group, "params": weights}
        if self._has_fused and _may_be_fused(options, weights):
            options["fused"] = True
        self._twin.param_groups = [options]
        self._twin.state = defaultdict(dict, tensors)
        self._twin.step()


def _may_be_fused(options: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    is_free = not any(options.get(choice) for choice in CHOICES) and options.get("fused") is None
    return is_free and all(t.device.type == "cpu" and t.is_floating_point() for t in tensors)


def steps_apart(optimizer: Optimizer) -> bool:
    """Whether an optimizer may be stepped in parts, see [Note: steps apart]."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return True
    try:
        return _is_same_apart(optimizer)
    except Exception:  # it cannot even step a part
        return False


def _is_same_apart(optimizer: Optimizer) -> bool:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 6, generator=generator) for _ in range(2)]
    grads = [torch.randn(2, 4, 6, generator=generator) for _ in range(3)]
    for options in optimizer.param_groups:
        together, apart = ([nn.Parameter(w.clone()) for w in weights] for _ in range(2))
        whole, part = trial_twin(optimizer, options, together), trial_twin(optimizer, options, [])
        group = part.param_groups[0]
        for grad in grads:
            for parameters in (together, apart):
                for parameter, own in zip(parameters, grad, strict=True):
                    parameter.grad = own.clone()
            whole.step()
            for parameter in reversed(apart):
                part.param_groups = [{**group, "params": [parameter]}]
                part.step()
        if not all(torch.equal(a, b) for a, b in zip(together, apart, strict=True)):
            return False
    return True


TRIAL_LR = 0.1
"""Learning rate of the trial of an unknown class: near zero, as in a warm-up, no step shows any."""


def trial_twin(
    optimizer: Optimizer, options: dict[str, Any], parameters: list[nn.Parameter]
) -> Optimizer:
    """An optimizer with the same settings over other parameters, none of its state shared.

    Only the learning rate is another one.
    """
    twin = twin_of(optimizer)
    group = {key: copy.deepcopy(value) for key, value in options.items() if key != "params"}
    if "lr" in group:
        lr = group["lr"]
        group["lr"] = torch.full_like(lr, TRIAL_LR) if isinstance(lr, Tensor) else TRIAL_LR
    twin.param_groups = [{**group, "params": parameters}]
    twin.state = defaultdict(dict)
    return twin
