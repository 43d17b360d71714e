"""Every private name of others that the project uses, each once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle as RemovableHandle

T = TypeVar("T")

F = TypeVar("F", bound=Callable[..., Any])


def innermost_frames() -> list[FrameType]:
    """What each thread of the interpreter runs now.

    Python looks under a lock: if it collected garbage there, and that asked again, it would wait
    for itself.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(sys._current_frames().values())
    finally:
        if collects:
            gc.enable()


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run a function when the backward under way has computed all its gradients."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether the caller runs inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def scaler_found_inf(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, torch.Tensor]:
    """The scaler's marks of non-finite gradients, by device; to be changed in place."""
    states: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    found: dict[torch.device, torch.Tensor] = states["found_inf_per_device"]
    return found


def trainer_accelerator(trainer: Any) -> Any:
    """The accelerator that a Trainer was made with, whatever its strategy says now."""
    return trainer._accelerator_connector.accelerator


def trainer_of(module: Any) -> Any:
    """The Trainer a LightningModule is attached to; None without one, where its property raises."""
    return module._trainer


def is_wrapped(optimizer: Any) -> bool:
    """Whether this is Lightning's wrapper, which pretends to be of its optimizer's class."""
    return "_optimizer" in vars(optimizer) and "_strategy" in vars(optimizer)


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The user's optimizer behind Lightning's wrapper."""
    plain: torch.optim.Optimizer = optimizer.optimizer if is_wrapped(optimizer) else optimizer
    return plain


def set_optimizers(strategy: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    """Set a strategy's optimizers, and Lightning's wrappers of them, past an override."""
    from lightning.pytorch.strategies import Strategy

    Strategy.optimizers.fset(strategy, optimizers)  # type: ignore[attr-defined]


def is_mock_optimizer(optimizer: Any) -> bool:
    """Whether Lightning made this optimizer because the user returned none."""
    from lightning.pytorch.core.optimizer import _MockOptimizer

    return isinstance(optimizer, _MockOptimizer)


def give_inner_io(wrapper: Any, inner: Any) -> bool:
    """Let a wrapper of Lightning write through a checkpoint IO, if it was made without one.

    Returns:
        False if this is no wrapper.
    """
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    if not isinstance(wrapper, _WrappingCheckpointIO):
        return False
    wrapper.checkpoint_io = inner  # ignored where there is one
    return True


def storage_identity(tensor: torch.Tensor) -> int:
    """Address of the storage object, the same for all views and over resizes."""
    return int(tensor.untyped_storage()._cdata)


def storage_users(tensor: torch.Tensor) -> int:
    """Tensors and others that hold the storage of a tensor, itself and this call's included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers that are part of its state dict."""
    left_out = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if name not in left_out}


def is_registering(depth: int) -> bool:
    """Whether a module reads an attribute only to see if the name of a parameter is free.

    Args:
        depth: Calls between the caller and the function that registers, if it is this one.
    """
    try:
        caller = sys._getframe(depth + 1)
    except ValueError:  # there are not so many calls
        return False
    return caller.f_code is nn.Module.register_parameter.__code__


def tensor_users(tensor: torch.Tensor) -> int:
    """Python as one, and graphs and views, that hold a tensor itself."""
    untyped: Any = tensor
    return int(untyped._use_count())


def unprofiled(function: Callable[..., T], *args: Any) -> T:
    """Call a function that torch's profiler is not to record.

    A transfer that is recorded when it begins and ends under a later profile crashes the process.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        return function(*args)
    finally:
        torch._C._autograd._enable_record_function(True)


def source_rank(work: Any) -> int:
    """From which rank of the group a message of any source has come."""
    return int(work._source_rank())


class NodeHandle:
    """Handle of a hook on a node of the graph, and what keeps that node alive."""

    def __init__(self, node: Any, handle: RemovableHandle) -> None:
        self._node, self._handle = node, handle

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()


def before_gradient(parameter: nn.Parameter, hook: Callable[[], None]) -> NodeHandle:
    """Run a function before a gradient is accumulated, and not when ``autograd.grad`` asks for one.

    A hook on the parameter would run for both.
    """
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    return NodeHandle(node, node.register_prehook(lambda _: hook()))


def watch_gradient(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> NodeHandle:
    """Run a function with each gradient that is about to be accumulated, as autograd made it."""

    def before(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            hook(gradients[0])

    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    return NodeHandle(node, node.register_prehook(before))


def after_gradient(
    parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]
) -> RemovableHandle:
    """Run a function after a gradient was accumulated; torch's own method has no types."""
    register: Any = parameter.register_post_accumulate_grad_hook
    handle: RemovableHandle = register(hook)
    return handle


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Replace every tensor in nested tuples, lists, dicts and registered classes."""
    return tree_map_only(torch.Tensor, function, tree)


def callbacks_of(trainer: Any) -> list[Any]:
    """The callbacks of a Trainer, which it sets outside of its constructor."""
    return list(trainer.callbacks)


def untraced(function: F) -> F:
    """A function that torch.compile calls, and does not trace; torch's own has no types."""
    disable: Any = torch.compiler.disable
    found: F = disable(function)
    return found


def is_compiled_outside(module: nn.Module) -> bool:
    """Whether a module is torch.compile's wrapper, whose own hooks are not traced."""
    return isinstance(module, OptimizedModule)


def compiled_modules(root: nn.Module) -> list[nn.Module]:
    """Modules in a tree that torch.compile traces as a whole, the outermost ones."""
    if getattr(root, "_compiler_ctx", None) is not None:  # trainer.fit(torch.compile(module))
        return [root]
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():
        is_compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
        if is_compiled and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks are called around an optimizer's steps, global ones aside."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
