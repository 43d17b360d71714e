"""Training a random graph with the engine and in a single process, and what differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from tests.helpers.graphs.modules import PACKERS, add_hooks, batch, build, input_seed
from tests.helpers.graphs.spec import Graph

Named = dict[str, Tensor | None]


@dataclass
class Record:
    """What one rank sees of a training."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    """By step: what the stepped optimizers saw; whole gradients, or this rank's pieces."""
    places: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """Strides of the dense parameter, and the first element of this rank's piece."""
    weights: dict[int, Named] = field(default_factory=dict)
    """By step: whole weights."""


class Training:
    """A module, its optimizers, and what both kinds of training do alike."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.plan = graph, graph.plan
        self.root, self.run = build(graph)
        self.names = {parameter: name for name, parameter in self.root.named_parameters()}
        parameters = list(self.names)
        count = min(self.plan.optimizers, len(parameters))
        self.optimizers = [self._optimizer(parameters[i::count]) for i in range(count)]

    def _optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        if self.plan.optimizer == "adamw":
            return AdamW(parameters, lr=1e-2, weight_decay=0.1)
        # Small steps where rounding differs, so that the steps after it do not make it grow.
        lr = 0.05 if self.graph.is_exact else 1e-4
        return SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)

    def stepped(self, step: int) -> list[Optimizer]:
        """The optimizers whose turn it is."""
        if self.plan.alternates:
            return [self.optimizers[step % len(self.optimizers)]]
        return self.optimizers

    def clear(self) -> None:
        """Clear the gradients as the plan says."""
        if self.plan.clears != "never":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=self.plan.clears == "none")

    def losses(self, rank: int, step: int, window: int, record: Record) -> tuple[Tensor, Tensor]:
        """Two losses of one backward, over all its forwards."""
        count = self.plan.forwards + self.plan.extra_forwards * (rank % 2)
        found = [self._forward(rank, step, window * 10 + number) for number in range(count)]
        first, second = (sum(part[1:], part[0]) for part in zip(*found, strict=True))
        record.losses += [first.item(), second.item()]
        return first, second

    def evaluate(self, rank: int, step: int, record: Record) -> None:
        """Forwards without gradient between steps."""
        counts = self.plan.evaluations
        self.root.eval()
        with torch.no_grad():
            for number in range(counts[rank % len(counts)]):
                record.losses.append(self._forward(rank, step, 100 + number)[0].item())
        self.root.train()

    def clamp(self) -> None:
        """Write to all weights."""
        with torch.no_grad():
            for parameter in self.names:
                if parameter.is_floating_point():
                    parameter.clamp_(-0.8, 0.8)

    def weights(self) -> Named:
        """Copies of all weights as they read now."""
        return {name: parameter.detach().clone() for parameter, name in self.names.items()}

    def _forward(self, rank: int, step: int, number: int) -> tuple[Tensor, Tensor]:
        self.run.rank, self.run.step = rank, step
        seed = input_seed(self.graph, rank, step, number)
        torch.default_generator.manual_seed(seed)  # without a look at other devices
        out = self.root(batch(self.graph, rank, step, number))
        if self.root.style in PACKERS:
            y, aux = PACKERS[self.root.style][1](out)
        else:
            y, aux = out, self.root.aux
            self.root.aux = None
        return y.square().mean() + aux, y.sin().mean()


def train_alone(graph: Graph) -> list[Record]:
    """One process computes what every rank would, and averages in the order of the ranks."""
    training, plan = Training(graph), graph.plan
    if graph.has_late_hooks:
        add_hooks(training.run)
    records = [Record() for _ in range(graph.ranks)]
    for step in range(plan.steps):
        totals = {parameter: parameter.grad for parameter in training.names}
        passes = [
            list(_local_gradients(training, rank, step, records[rank]))
            for rank in range(graph.ranks)
        ]
        for per_rank in zip(*passes, strict=True):  # of one reduction
            for parameter, total in totals.items():
                mean = _mean([gradients.get(parameter) for gradients in per_rank])
                if mean is not None:
                    totals[parameter] = mean if total is None else total + mean
        for parameter, total in totals.items():
            parameter.grad = total
        stepped = training.stepped(step)
        if plan.clip_value is not None:
            for parameter in [p for o in stepped for p in _parameters(o) if p.grad is not None]:
                parameter.grad.clamp_(-plan.clip_value, plan.clip_value)
        seen = {
            training.names[p]: None if p.grad is None else p.grad.clone()
            for optimizer in stepped
            for p in _parameters(optimizer)
        }
        for optimizer in stepped:
            optimizer.step()
        training.clear()
        if plan.writes:
            training.clamp()
        whole = training.weights()
        for rank, record in enumerate(records):
            training.evaluate(rank, step, record)
            record.gradients.append(seen)
            record.weights[step] = whole
    return records


def _local_gradients(
    training: Training, rank: int, step: int, record: Record
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Gradients of one rank, once for each reduction."""
    plan = training.plan
    is_kept = plan.has_no_sync and training.graph.options["stage"] == 1
    for parameter in training.names:
        parameter.grad = None
    for window in range(plan.backwards):
        losses = training.losses(rank, step, window, record)
        for loss in losses[: 1 if plan.losses == "one" else 2]:
            loss.backward(retain_graph=loss is losses[0] and plan.losses != "one")
            is_last = window == plan.backwards - 1 and (plan.losses == "one" or loss is losses[1])
            if is_last or not is_kept and not (plan.losses == "scoped" and loss is losses[0]):
                yield {p: p.grad for p in training.names if p.grad is not None}
                for parameter in training.names:
                    parameter.grad = None


def _mean(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Average in the order of the ranks, where None stands for zeros; None if there is no other."""
    like = next((gradient for gradient in gradients if gradient is not None), None)
    if like is None:
        return None
    scaled = [
        torch.zeros_like(like) if gradient is None else gradient * (1.0 / len(gradients))
        for gradient in gradients
    ]
    return sum(scaled[1:], scaled[0])


def train_sharded(graph: Graph, groups: ShardGroups) -> Record:
    """This rank's part of a training with the engine."""
    training, plan, record = Training(graph), graph.plan, Record()
    if groups.rank:  # rank 0 says what the weights are
        with torch.no_grad():
            for parameter in training.names:
                if parameter.numel():
                    parameter.add_(1)
    engine = ZeroEngine(training.root, training.optimizers, ZeroOptions(**graph.options), groups)
    try:
        if graph.has_late_hooks:
            add_hooks(training.run)
        for step in range(plan.steps):
            _backwards(engine, training, groups.rank, step, record)
            seen: Named = {}
            for optimizer in training.stepped(step):
                if plan.clip_value is not None:
                    engine.clip_grad_value_(optimizer, plan.clip_value)
                engine.step(optimizer, _watched(engine, training, optimizer, seen, record))
            record.gradients.append(seen)
            training.clear()
            if plan.writes:
                with engine.full_params(writeback=True):
                    training.clamp()
            if plan.watches:
                with engine.full_params():
                    record.weights[step] = training.weights()
            training.evaluate(groups.rank, step, record)
        saved = engine.module_state_dict()
        engine.close()
    except BaseException:
        engine.abandon()
        raise
    record.weights[plan.steps - 1] = training.weights()
    if groups.rank == 0:
        record.weights[-1] = {name: saved.get(name) for name in training.names.values()}
    return record


def _backwards(
    engine: ZeroEngine, training: Training, rank: int, step: int, record: Record
) -> None:
    plan = training.plan
    nothing = contextlib.nullcontext
    for window in range(plan.backwards):
        losses = training.losses(rank, step, window, record)
        calls = losses[: 1 if plan.losses == "one" else 2]
        for loss in calls if plan.losses != "scoped" else (None,):
            is_last = window == plan.backwards - 1 and (loss is None or loss is calls[-1])
            with engine.no_sync() if plan.has_no_sync and not is_last else nothing():
                if loss is None:
                    with engine.backward_scope():
                        losses[0].backward(retain_graph=True)
                        losses[1].backward()
                elif plan.is_direct:
                    loss.backward(retain_graph=loss is not calls[-1])
                else:
                    engine.backward(loss, retain_graph=loss is not calls[-1])


def _watched(
    engine: ZeroEngine, training: Training, optimizer: Optimizer, seen: Named, record: Record
) -> Callable[[], None]:
    """A step that notes the gradients that the optimizer sees."""
    parameters = _parameters(optimizer)

    def run() -> None:
        for parameter in parameters:
            piece = engine.table.piece(parameter)
            if piece is not None:
                name, grad = training.names[parameter], piece.tensor.grad
                seen[name] = None if grad is None else grad.clone()
                record.places[name] = piece.slot.stride, piece.piece.param_offset
        optimizer.step()

    return run


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
