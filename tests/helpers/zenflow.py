"""ZenFlow once more, in a few lines over whole parameters: what the strategy is held against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.999), 1e-8


class Simulated:
    """Trains a module by AdamW in two worlds; each rank holds all of it.

    Args:
        net: The module.
        ratio: Share of columns that are important.
        window: Steps that the rest waits for; a float for as long as it takes until so many of the
            weights are due.
        select: Steps after which columns are chosen anew.
        warm_up: First steps in which everything is stepped.
        is_late: The rest's new values are used one window later.
    """

    def __init__(
        self,
        net: nn.Module,
        ratio: float,
        window: int | float,
        select: int,
        warm_up: int = 0,
        is_late: bool = False,
    ) -> None:
        self.net = net
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self.ratio, self.window, self.select, self.warm_up = ratio, window, select, warm_up
        self.is_late = is_late
        self.master = [p.detach().double().clone() for p in self.parameters]
        self.first = [torch.zeros_like(m) for m in self.master]
        self.second = [torch.zeros_like(m) for m in self.master]
        self.count = [torch.zeros_like(m) for m in self.master]
        self.waiting = [torch.zeros_like(m) for m in self.master]
        self.waited = [0 for _ in self.master]
        self.is_important = [torch.full_like(m, p.dim() < 2, dtype=torch.bool) for m, p in self._()]
        self.late: list[Tensor] = []
        self.steps = self.in_window = 0
        self.windows: list[int] = []
        """Steps that wait after each step."""

    def _(self) -> Iterable[tuple[Tensor, nn.Parameter]]:
        return zip(self.master, self.parameters, strict=True)

    def step(self, max_norm: float | None = None) -> None:
        """One step by the gradients of the parameters, averaged over the ranks."""
        grads = [None if p.grad is None else p.grad.double() for p in self.parameters]
        grads = [self._averaged(p, g) for p, g in zip(self.parameters, grads, strict=True)]
        if max_norm is not None:
            norm = torch.stack([g.norm() for g in grads if g is not None]).norm()
            scale = min(1.0, max_norm / (float(norm) + 1e-6))
            grads = [None if g is None else g * scale for g in grads]
        is_warm = self.steps < self.warm_up
        selects = not is_warm and (self.steps - self.warm_up) % self.select == 0
        if selects:
            self._end_window(is_sync=True)
            self._choose(grads)
        for at, grad in enumerate(grads):
            if grad is not None:
                self._adam(at, grad, self.is_important[at])
                self.waiting[at] += grad
                self.waited[at] += 1
        self.in_window += 1
        is_auto = isinstance(self.window, float)
        if is_warm or (self._is_due(grads) if is_auto else self.in_window == self.window):
            self._end_window(is_sync=is_warm)
        self.windows.append(self.in_window)
        self._show()
        self.steps += 1

    def _averaged(self, parameter: nn.Parameter, grad: Tensor | None) -> Tensor | None:
        """None if no rank has a gradient."""
        has = torch.tensor(float(grad is not None))
        dist.all_reduce(has)
        if not has:
            return None
        total = torch.zeros_like(parameter, dtype=torch.float64) if grad is None else grad.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def _choose(self, grads: list[Any]) -> None:
        for at, (grad, parameter) in enumerate(zip(grads, self.parameters, strict=True)):
            if grad is None or parameter.dim() < 2:
                continue
            rows = grad.reshape(len(grad), -1)
            count = max(1, int(self.ratio * rows.shape[1]))
            best = rows.square().sum(0).topk(count).indices
            important = torch.zeros_like(rows, dtype=torch.bool)
            important[:, best] = True
            self.is_important[at] = important.view_as(grad)

    def _is_due(self, grads: list[Any]) -> bool:
        due = []
        for waiting, grad, important in zip(self.waiting, grads, self.is_important, strict=True):
            if grad is not None and grad.dim() > 1:
                rest = waiting[~important].square().mean()
                due.append(bool(rest >= grad[important].square().mean()))
        return sum(due) >= self.window * len(due)

    def _end_window(self, is_sync: bool = False) -> None:
        for at, waiting in enumerate(self.waiting):
            if self.waited[at]:
                self._adam(at, waiting / self.in_window, ~self.is_important[at])
            waiting.zero_()
            self.waited[at] = 0
        self.in_window = 0
        if self.is_late and not is_sync:
            before, self.late = self.late, [m.clone() for m in self.master]
            self._shown = before or self._shown
        else:
            self.late = []
            self._shown = [m.clone() for m in self.master]

    def _adam(self, at: int, grad: Tensor, where: Tensor) -> None:
        master, first, second, count = (
            values[at] for values in (self.master, self.first, self.second, self.count)
        )
        count[where] += 1
        steps = count.clamp(min=1)
        new_first = first.lerp(grad, 1 - BETAS[0])
        new_second = second * BETAS[1] + grad.square() * (1 - BETAS[1])
        root = (new_second / (1 - BETAS[1] ** steps)).sqrt() + EPS
        new = master * (1 - LR * DECAY) - LR * new_first / (1 - BETAS[0] ** steps) / root
        for old, value in ((master, new), (first, new_first), (second, new_second)):
            old[where] = value[where]

    def _show(self) -> None:
        with torch.no_grad():
            for at, (master, parameter) in enumerate(self._()):
                shown = self._shown[at] if self.is_late and self._shown else master
                parameter.copy_(torch.where(self.is_important[at], master, shown))

    _shown: list[Tensor] = []
