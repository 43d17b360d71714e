"""Trainings in a bare loop with and without offload, which are to end in the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from lightning_zero.optim import places
from tests.helpers.late_link import LateLink

BUCKET_NUMEL = 400
"""Less than the largest matrix below has."""


class Net(nn.Module):
    """Odd sizes, a scalar, a matrix larger than any bucket, layers for some or no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.wide = nn.Linear(11, 61)
        self.last = nn.Linear(61, 3)
        self.on_rank_0 = nn.Linear(3, 3)
        self.idle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(torch.tanh(self.wide(torch.tanh(self.first(x)) * self.scale)))
        if not dist.is_initialized() or dist.get_rank() == 0:
            x = x + self.on_rank_0(x)
        return x.float().square().mean()


def make_net(dtype: torch.dtype) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().to(dtype)


@dataclass
class Run:
    """A training under way."""

    net: Net
    optimizer: Optimizer
    engine: ZeroEngine
    step: int = 0
    seen: list[Any] = field(default_factory=list)
    """What a case wants to be equal, besides weights and states."""

    @property
    def is_sharded(self) -> bool:
        return self.engine.options.stage == 3


Change = Callable[[Run], None]


def two_groups(make: Callable[..., Optimizer], **options: Any) -> Callable[[Net], Optimizer]:
    """Another rate and no decay for what has one dimension."""

    def of(net: Net) -> Optimizer:
        matrices = [p for p in net.parameters() if p.dim() > 1]
        rest = [p for p in net.parameters() if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": rest, "lr": 3e-3, "weight_decay": 0.0}]
        return make(groups, **{"lr": 1e-2, "weight_decay": 0.1, **options})

    return of


fused_adamw = two_groups(torch.optim.AdamW, fused=True)


@dataclass(frozen=True)
class Case:
    """One training."""

    make: Callable[[Net], Optimizer] = fused_adamw
    dtype: torch.dtype = torch.float32
    steps: int = 4
    window: int = 1
    """Batches that a step accumulates."""

    max_norm: float | None = 0.1
    max_value: float | None = None
    zero_grad: Callable[[Optimizer], None] | None = Optimizer.zero_grad
    begin: Change | None = None
    """Called before the first step."""

    before_step: Change | None = None
    """Called after backward and clipping."""

    after_step: Change | None = None
    is_raw: bool = False
    """Step by ``optimizer.step()``."""

    has_schedule: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=lambda: {"offload_optimizer": "cpu"})
    bound: float = 0.0
    """Largest difference, relative to the larger of 1 and the value."""


Outcome = dict[str, Tensor]


def trained(case: Case, stage: int, groups: ShardGroups, is_offloaded: bool) -> Outcome:
    """Weights, states and what was seen; the first two on rank 0."""
    net = make_net(case.dtype)
    optimizer = case.make(net)
    options = {**case.options, **(case.offload if is_offloaded else {})}
    zero = ZeroOptions(stage=stage, bucket_numel=BUCKET_NUMEL, **options)
    run = Run(net, optimizer, ZeroEngine(net, [optimizer], zero, groups))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if case.begin is not None:
        case.begin(run)
    for run.step in range(case.steps):
        one_step(case, run)
        if case.has_schedule:
            schedule.step()
    found = outcome(run)
    run.engine.close()
    return found


def one_step(case: Case, run: Run) -> None:
    engine, optimizer = run.engine, run.optimizer
    for batch in batches(case, run.step):
        engine.backward(run.net(batch))
    if case.max_norm is not None:
        run.seen.append(engine.clip_grad_norm_(optimizer, case.max_norm))
    if case.max_value is not None:
        engine.clip_grad_value_(optimizer, case.max_value)
    if case.before_step is not None:
        case.before_step(run)
    if case.is_raw:
        optimizer.step()
    else:
        engine.step(optimizer)
    if case.after_step is not None:
        case.after_step(run)
    if case.zero_grad is not None:
        case.zero_grad(optimizer)


def batches(case: Case, step: int) -> Iterable[Tensor]:
    """Different ones on each rank and in each step; the last window is not full."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(100 * step + rank)
    is_unfull = case.window > 1 and step == case.steps - 1
    for _ in range(case.window - is_unfull):
        yield torch.randn(4, 7, generator=generator).to(case.dtype)


def outcome(run: Run) -> Outcome:
    found: Outcome = dict(run.engine.module_state_dict())
    states = run.engine.optimizer_state_dict(run.optimizer)
    for index, state in states.get("state", {}).items():
        found |= {f"{index}.{name}": v for name, v in state.items() if isinstance(v, Tensor)}
    for group in states.get("param_groups", ()):  # an optimizer may keep state there
        found |= {f"group.{n}": v for n, v in group.items() if isinstance(v, Tensor)}
    for number, value in enumerate(run.seen):
        found[f"seen.{number}"] = torch.as_tensor(value)
    return {name: value.detach().clone() for name, value in found.items()}


def compared(case: Case, stage: int, groups: ShardGroups, is_late: bool) -> tuple[float, bool]:
    """Largest difference that offload makes, and whether anything was trained at all.

    Args:
        case: The training.
        stage: Stage of ZeRO.
        groups: The ranks.
        is_late: Copies to and from the host happen as late as they may.
    """
    plain = trained(case, stage, groups, is_offloaded=False)
    late = LateLink(torch.device("cpu"))
    with late_copies(late) if is_late else nullcontext():
        found = trained(case, stage, groups, is_offloaded=True)
    start = make_net(case.dtype).state_dict()
    is_trained = groups.rank > 0 or any(not found[name].equal(v) for name, v in start.items())
    return gap(plain, found), is_trained and (not is_late or late.late_count > 0)


@contextmanager
def late_copies(link: LateLink) -> Iterator[None]:
    """Engines that are made inside have this link."""
    make_link = places.make_link
    places.make_link = lambda device, pin_memory=True: link
    try:
        yield
    finally:
        places.make_link = make_link


def gap(a: Outcome, b: Outcome) -> float:
    """Largest difference relative to the larger of 1 and the value; NaN equals NaN."""
    if a.keys() != b.keys():
        raise AssertionError(f"names differ: {sorted(a.keys() ^ b.keys())}")
    found = 0.0
    for name, value in a.items():
        if value.shape != b[name].shape or value.dtype != b[name].dtype:
            raise AssertionError(f"{name}: {value.shape} {value.dtype}, {b[name].dtype}")
        left, right = value.double(), b[name].double()
        off = (left - right).abs() / left.abs().clamp(min=1.0)
        off[left.isnan() & right.isnan()] = 0.0
        if off.numel():
            found = max(found, float("inf") if off.isnan().any() else off.max().item())
    return found
