"""The modules of a random graph, and how the forward of a block runs its program."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.graphs.spec import ROWS, VOCAB, WIDTH, Graph, Hook, Node, Op


class Lookup(nn.Module):
    """An embedding of what is computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.detach()[:, 0].abs() * 5).long().clamp(max=VOCAB - 1)
        return self.table(rows)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.filter(x[:, None]).mean(1)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, self.cell(x.flip(0)))


class Recurrent(nn.Module):
    """Holds its weights in a flat list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attended(nn.Module):
    """Reads the weights of its output layer without calling it."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(WIDTH) * 0.1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * (1 + scale)
        return x + self.scales[1]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ParameterDict(
            {"shift": nn.Parameter(torch.randn(WIDTH)), "gain": nn.Parameter(torch.tensor(0.7))}
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.of["gain"] + self.of["shift"] * self.of["gain"]


class Raw(nn.Module):
    """Bare parameters of odd shapes and memory orders."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)
        self.vector = nn.Parameter(torch.randn(WIDTH))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        self.channels = nn.Parameter(torch.randn(1, WIDTH, 1, 1) * 0.1)
        self.filters = nn.Parameter(
            torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last) * 0.1
        )
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.matrix + self.vector * self.scalar
        x = x * (self.one + self.channels.view(WIDTH))
        return x + self.filters.square().sum() + self.nothing.sum()


class Quantised(nn.Module):
    """Integers that are made numbers again in forward, times a trained scale."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        low = torch.iinfo(dtype).min
        codes = torch.randint(low, low + 255, (WIDTH, WIDTH)).to(dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale)


class Narrow(nn.Module):
    """Computes in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float()).to(x.dtype)


@dataclass
class Packed:
    x: Tensor
    more: dict[str, Any]


class Box:
    """An object that no tree walker looks into."""

    def __init__(self, x: Tensor, aux: Tensor) -> None:
        self.kept = (x, aux)


Pair = namedtuple("Pair", "x aux")  # noqa: PYI024  (what users return)

PACKERS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, aux: (x, aux), lambda out: out),
    "dict": (lambda x, aux: {"x": x, "aux": aux}, lambda out: (out["x"], out["aux"])),
    "nested": (
        lambda x, aux: [{"parts": (x, [aux])}, None],
        lambda out: (out[0]["parts"][0], out[0]["parts"][1][0]),
    ),
    "named": (Pair, lambda out: (out.x, out.aux)),
    "dataclass": (
        lambda x, aux: Packed(x, {"aux": aux}),
        lambda out: (out.x, out.more["aux"]),
    ),
    "object": (Box, lambda out: out.kept),
}
STYLES = ("tensor", *PACKERS)
"""A block of style ``tensor`` leaves its second output on itself."""


class Run:
    """Where a forward is: known to all blocks, and no part of the module."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rank = self.step = 0
        self.root: nn.Module | None = None

    def parameter(self, name: str) -> Tensor:
        """Read a parameter of any module by its name, as ``module.weight`` does."""
        owner, _, attribute = name.rpartition(".")
        return getattr(self.root.get_submodule(owner), attribute)


class Block(nn.Module):
    """A module whose forward is a random program over its children and the whole model."""

    def __init__(self, children: list[nn.Module], style: str, path: str, run: Run) -> None:
        super().__init__()
        for index, child in enumerate(children):
            self.add_module(f"c{index}", child)
        self.style, self.run = style, run
        self.program = run.graph.programs.get(path, ())
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        x, aux = execute(self, self.program, x, x.new_zeros(()))
        if self.style in PACKERS:
            return PACKERS[self.style][0](x, aux)
        self.aux = aux
        return x


class Chain(nn.Module):
    """A ModuleList or ModuleDict, called one by one."""

    def __init__(self, children: list[nn.Module], is_dict: bool) -> None:
        super().__init__()
        if is_dict:
            self.parts = nn.ModuleDict({f"c{i}": child for i, child in enumerate(children)})
        else:
            self.parts = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts.values() if isinstance(self.parts, nn.ModuleDict) else self.parts
        for part in parts:
            x = x + torch.tanh(part(x))
        return x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "unbiased": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "lookup": Lookup,
    "convolved": Convolved,
    "cell": Cell,
    "recurrent": Recurrent,
    "attended": lambda: Attended(True),
    "fused_attended": lambda: Attended(False),
    "listed": Listed,
    "named": Named,
    "raw": Raw,
    "normed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "int8": lambda: Quantised(torch.int8),
    "uint8": lambda: Quantised(torch.uint8),
}
CONTAINERS = ("block", "sequential", "module_list", "module_dict")


def build(graph: Graph) -> tuple[nn.Module, Run]:
    """Make the module of a graph with its initial values; the same each time."""
    run = Run(graph)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(graph.seed)
        run.root = root = _make(graph.tree, "", run, graph.dtype)
    for kept, replaced in graph.ties:  # parameters, or whole layers
        owner, _, attribute = replaced.rpartition(".")
        setattr(root.get_submodule(owner), attribute, run.parameter(kept))
    if not graph.has_late_hooks:
        add_hooks(run)
    return root, run


def _make(node: Node, path: str, run: Run, dtype: torch.dtype) -> nn.Module:
    prefix = f"{path}." if path else ""
    inner = f"{prefix}parts." if node.kind in ("module_list", "module_dict") else prefix
    names = [f"{inner}{_child_name(node, i)}" for i in range(len(node.children))]
    children = [
        _make(child, name, run, dtype) for child, name in zip(node.children, names, strict=True)
    ]
    if node.kind == "block":
        return Block(children, node.style, path, run)
    if node.kind == "sequential":
        return nn.Sequential(*children)
    if node.kind in CONTAINERS:
        return Chain(children, node.kind == "module_dict")
    layer = LAYERS[node.kind]()
    layer.to(torch.float32 if node.is_narrow else dtype)
    if node.is_frozen:
        layer.requires_grad_(False)
    return Narrow(layer) if node.is_narrow else layer


def _child_name(node: Node, index: int) -> str:
    return str(index) if node.kind in ("sequential", "module_list") else f"c{index}"


def add_hooks(run: Run) -> None:
    """Register the user's hooks of a graph."""
    for hook in run.graph.hooks:
        _add_hook(hook, run)


def _add_hook(hook: Hook, run: Run) -> None:
    def factor(like: Tensor) -> Tensor:
        return 1 + 0.1 * torch.tanh(run.parameter(hook.name).to(like.dtype).sum())

    if hook.kind == "parameter":
        run.parameter(hook.path).register_hook(lambda grad: grad * factor(grad).detach())
        return
    module = run.root.get_submodule(hook.path)
    if hook.kind == "before":
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor(inputs[0]),))
    elif hook.kind == "after":
        module.register_forward_hook(lambda _, inputs, out: out * factor(out))
    else:
        module.register_full_backward_hook(
            lambda _, grads, outs: tuple(g if g is None else g * factor(g).detach() for g in grads)
        )


class Two(torch.autograd.Function):
    """Keeps the weights of two modules for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b)
        return x @ a.t() + x @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, a, b = ctx.saved_tensors
        return grad @ a + grad @ b.t(), grad.t() @ x, x.t() @ grad


def execute(block: Block, ops: tuple[Op, ...], x: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
    """Run a program."""
    for op in ops:
        if op.kind == "branch" or op.when.holds(block.run.rank, block.run.step, x):
            x, aux = OPS[op.kind](block, op, x, aux)
    return x, aux


def call(block: Block, name: str, x: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
    """Call a child, or with a slash before its path any layer, and unpack what it returns."""
    is_far = name.startswith("/")
    child = block.run.root.get_submodule(name[1:]) if is_far else block.get_submodule(name)
    out = child(x)
    if not isinstance(child, Block):
        return out, aux
    if child.style in PACKERS:
        y, more = PACKERS[child.style][1](out)
    else:
        y, more = out, child.aux
        child.aux = None
    return y, aux + more


def use(x: Tensor, weight: Tensor, how: str) -> Tensor:
    """A term with a weight of any shape, read as a whole or in part."""
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype) / (1 if weight.is_floating_point() else 256)
    weight = {
        "": lambda w: w,
        "detach": lambda w: w.detach(),
        "clone": lambda w: w.clone(),
        "slice": lambda w: w[:2] if w.dim() else w,
        "flat": lambda w: w.reshape(-1),
    }[how](weight)
    if weight.dim() == 2 and weight.shape[1] == WIDTH:
        return F.linear(x, weight) @ weight
    if weight.shape == (WIDTH,):
        return x * weight
    return x * (weight.square().sum() / (1 + weight.numel()))


def _call(block, op, x, aux):
    count = op.count + (block.run.rank if op.how == "rank" else 0)
    for _ in range(count):
        y, aux = call(block, op.child, x, aux)
        x = x + 0.5 * torch.tanh(y)
    return x, aux


def _read(block, op, x, aux):
    return x + 0.5 * torch.tanh(use(x, block.run.parameter(op.names[0]), op.how)), aux


def _hold(block, op, x, aux):
    """The weight is read before a child runs, and used after it."""
    weight = block.run.parameter(op.names[0])
    y, aux = call(block, op.child, x, aux)
    return x + 0.5 * torch.tanh(use(y, weight, op.how)), aux


def _pair(block, op, x, aux):
    a, b = (block.run.parameter(name) for name in op.names)
    return x + 0.5 * torch.tanh(Two.apply(x, a, b)), aux


def _penalty(block, op, x, aux):
    owner = block if op.child == "own" else block.run.root
    if op.how == "named":
        listed = [parameter for _, parameter in owner.named_parameters()]
    elif op.how == "by_module":  # tied ones are counted twice
        listed = [p for module in owner.modules() for p in module.parameters(recurse=False)]
    else:
        listed = list(owner.parameters())
    for parameter in listed:
        if parameter.is_floating_point():
            aux = aux + 1e-2 * parameter.square().sum().to(aux.dtype)
    return x, aux


def _in_place(block, op, x, aux):
    y, aux = call(block, op.child, x, aux)
    if op.how == "direct":  # what the child returned, which its own nodes have not saved
        return x + 0.5 * y.relu_(), aux
    return torch.tanh_(y + x), aux


def _quiet(block, op, x, aux):
    with torch.no_grad():
        y, _ = call(block, op.child, x, aux)
    return x + 0.5 * torch.tanh(y), aux


def _recompute(block, op, x, aux):
    if not torch.is_grad_enabled():
        return execute(block, op.inner, x, aux)

    def region(x):
        return execute(block, op.inner, x, x.new_zeros(()))

    x, more = checkpoint(region, x, use_reentrant=block.run.graph.reentrant)
    return x, aux + more


def _branch(block, op, x, aux):
    is_taken = op.when.holds(block.run.rank, block.run.step, x)
    return execute(block, op.inner if is_taken else op.other, x, aux)


def _slope(block, op, x, aux):
    """A backward within the forward, for an input, and through it if it is a penalty."""
    if not torch.is_grad_enabled():
        return x, aux
    source = x if x.requires_grad else x.detach().requires_grad_()
    y, more = call(block, op.child, source, aux)
    y = y.square().sum() + x.sum()
    (slope,) = torch.autograd.grad(y, source, create_graph=op.how == "penalty", retain_graph=True)
    if op.how == "penalty":
        return x, more + 0.1 * torch.tanh(slope).square().mean()
    return x + 0.1 * torch.tanh(slope), more


def _late(block, op, x, aux):
    """A weight is first read in backward."""
    x = x * 1.0
    if x.requires_grad:
        name, run = op.names[0], block.run
        x.register_hook(lambda g: g * (1 + torch.tanh(run.parameter(name).sum()).to(g.dtype)))
    return x, aux


def _dropout(block, op, x, aux):
    return F.dropout(x, 0.2), aux


def _joined(block, op, x, aux):
    parts = [block.run.parameter(name).to(x.dtype).flatten() for name in op.names]
    return x + torch.tanh(torch.cat(parts).mean()), aux


OPS: dict[str, Callable[[Block, Op, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "call": _call,
    "read": _read,
    "hold": _hold,
    "pair": _pair,
    "penalty": _penalty,
    "in_place": _in_place,
    "quiet": _quiet,
    "recompute": _recompute,
    "branch": _branch,
    "slope": _slope,
    "late": _late,
    "dropout": _dropout,
    "joined": _joined,
}


def input_seed(graph: Graph, rank: int, step: int, number: int) -> int:
    """Of the input and of dropout in one forward."""
    return ((graph.seed * 11 + rank) * 101 + step) * 1009 + number


def batch(graph: Graph, rank: int, step: int, number: int) -> Tensor:
    """The input of one forward, [ROWS, WIDTH]."""
    generator = torch.Generator().manual_seed(input_seed(graph, rank, step, number))
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x.to(graph.dtype).requires_grad_()
