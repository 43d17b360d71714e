"""Ties a module to the coordinator: unit hooks, watched parameter reads, and saved tensors.

[Note: saved tensors]
Autograd keeps views of weights for backward. While the engine runs a forward, each saved view of a
bucket is replaced by its place in the bucket, and backward, when it asks for the view, gathers the
bucket first. This holds for any container a module returns its outputs in, and for outputs it
stores elsewhere. Hooks switch off autograd's own check for tensors that were changed in place after
they were saved, so the check is made here.

[Note: compiled modules]
What torch.compile traces must not meet our hooks; where it does (a model that Fabric compiles after
its set-up), they run between two graphs. The wrapper that ``torch.compile(module)`` makes has hooks
of its own around the traced code, so it is a unit like any other. A module that was compiled in
place, or the whole model, has no outside: its parameters come before the forward of the whole model
begins, and go after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero import _compat
from lightning_zero._compat import RemovableHandle
from lightning_zero.params import parameter_dict
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.params.units import Unit, external_parameters
from lightning_zero.prefetch.coordinator import ParameterCoordinator


class ModuleHooks:
    """All that is installed on a module; ``remove`` takes it off again.

    Args:
        root: The whole model.
        units: Units of the model.
        coordinator: Told of every use.
        step_scope: Makes the scope in which the root's forward runs.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        coordinator: ParameterCoordinator,
        step_scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._root = root
        self._coordinator = coordinator
        self._handles: list[RemovableHandle] = []
        self._watched: set[nn.Module] = set()
        self.of_whole_forward: list[ParameterBucket] = []
        """What compiled code uses from within, see [Note: compiled modules], and externals of the
        root, whose forward is that of the whole."""
        self.follow(units)
        self._watch_root(step_scope)

    def follow(self, units: Sequence[Unit]) -> None:
        """Watch all modules that are not watched yet.

        Args:
            units: Units of the model as it is now.
        """
        compiled = _compat.compiled_modules(self._root)
        traced = {inner for outer in compiled for inner in outer.modules()}
        on_access = _compat.untraced(self._coordinator.on_access)
        new = [module for module in self._root.modules() if module not in self._watched]
        for module in new:
            self._watch_state_dict(module)
            if module not in traced:
                parameter_dict.install(module, on_access, self._on_listing)
        wrappers = (module for module in compiled if _compat.is_compiled_outside(module))
        outside = {module for module in wrappers if module is not self._root}
        for unit in units:
            is_new = unit.module not in self._watched and unit.module is not self._root
            if is_new and (unit.module in outside or unit.module not in traced):
                self._watch_unit(unit.name, unit.module, unit.uses)
        self._watched.update(new)
        within = [p for module in compiled if module not in outside for p in module.parameters()]
        within += external_parameters(self._root)
        self.of_whole_forward = _buckets_of(within, self._coordinator)

    def remove(self) -> None:
        """Take everything off the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self._watched:  # those that were taken out of the model included
            parameter_dict.uninstall(module)

    def _on_listing(self, listed: parameter_dict.ZeroParameterDict) -> None:
        own = [parameter for parameter in listed.plain().values() if parameter is not None]
        visits = self._coordinator.visits
        is_wanted = self._coordinator.is_in_step and not visits.is_left_alone
        if visits.is_loading and own and not is_wanted:
            visits.keep_only(_buckets_of(own, self._coordinator))
            is_wanted = True
        for parameter in own:
            bucket = self._coordinator.bucket_of(parameter)
            if bucket is not None and (bucket.is_resident or is_wanted):
                self._coordinator.on_access(parameter)

    def _watch_state_dict(self, module: nn.Module) -> None:
        """A state dict is a listing that wants the values."""
        if not module._parameters:
            return

        def before() -> None:
            own = parameter_dict.plain(module).values()
            self._coordinator.on_state_dict(p for p in own if p is not None)

        register: Any = module.register_state_dict_pre_hook  # it has no types
        self._handles.append(register(Hook(before)))

    def _watch_unit(self, name: str, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        buckets = _buckets_of(parameters, self._coordinator)
        if buckets:
            self._register(
                module,
                lambda: self._coordinator.before(name, buckets),
                lambda: self._coordinator.after(buckets),
            )

    def _watch_root(self, step_scope: Callable[[], AbstractContextManager[None]]) -> None:
        """In a bare loop the root's forward is the step; Lightning opens the scope itself."""
        stack: list[AbstractContextManager[None]] = []

        def begin() -> None:
            scope = step_scope()
            scope.__enter__()
            stack.append(scope)

        def end() -> None:
            if stack:
                stack.pop().__exit__(None, None, None)

        self._register(self._root, begin, end)

    def _register(
        self, module: nn.Module, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self._handles += [
            module.register_forward_pre_hook(Hook(before), prepend=True),
            module.register_forward_hook(Hook(after), always_call=True),
        ]


class Hook:
    """A hook that a deep copy or a pickle of the module loses."""

    def __init__(self, run: Callable[[], None] | None) -> None:
        self._run = run

    @_compat.untraced
    def __call__(self, *_: Any) -> None:
        """Called with what torch gives; the copy does nothing."""
        if self._run is not None:
            self._run()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Hook, (None,))


class _SavedView(NamedTuple):
    """Where a saved weight lies, instead of the weight."""

    bucket: ParameterBucket
    module: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int | None
    """Version of its parameter; None for a view that does not share it (``weight.data``)."""


class _SavedTensor(NamedTuple):
    """Any other saved tensor, and its version when it was saved."""

    tensor: Tensor
    version: int


class SavedTensors:
    """Weights that autograd saves are kept as their place, see [Note: saved tensors].

    Args:
        coordinator: Gathers what backward asks for.
    """

    def __init__(self, coordinator: ParameterCoordinator) -> None:
        self._coordinator = coordinator
        self._by_storage = coordinator.residency.by_storage
        self._offsets: dict[ParameterBucket, list[int]] = {}
        # The same two objects each time: compiled code is guarded by their identity.
        self._pack: Callable[[Tensor], Any] = self.pack
        self._unpack: Callable[[Any], Tensor] = self.unpack

    @contextmanager
    def forward_scope(self, buckets: Sequence[ParameterBucket] = ()) -> Iterator[None]:
        """Scope of one forward: weights saved in it are gathered again in backward.

        Args:
            buckets: Are available from its beginning to its end.
        """
        coordinator = self._coordinator
        if coordinator.is_in_forward:
            with coordinator.forward_scope():
                yield
            return
        with coordinator.forward_scope(), self._saved(), _used(coordinator, buckets):
            yield

    def pack(self, tensor: Tensor) -> _SavedView | _SavedTensor:
        """What is kept instead of a tensor."""
        bucket = self._by_storage.get(_storage_key(tensor))
        if bucket is not None:
            module, offset = self._coordinator.running_module, int(tensor.storage_offset())
            version = tensor._version if self._is_current(bucket, offset, tensor._version) else None
            return _SavedView(bucket, module, tensor.shape, tensor.stride(), offset, version)
        # An output that was saved by its own node would keep that node alive for ever.
        kept = tensor.detach() if tensor.grad_fn is not None else tensor
        return _SavedTensor(kept, tensor._version)

    def unpack(self, saved: _SavedView | _SavedTensor) -> Tensor:
        """The tensor that was to be kept."""
        if isinstance(saved, _SavedView):
            version = saved.version
            if version is not None and not self._is_current(saved.bucket, saved.offset, version):
                raise RuntimeError(
                    "a weight that backward needs was modified by an in-place operation after the"
                    f" forward had used it: part of {saved.bucket}, shape {tuple(saved.shape)}."
                    " Write to weights before the forward, or after backward."
                )
            self._coordinator.need(saved.bucket, saved.module)
            return saved.bucket.flat.as_strided(saved.shape, saved.stride, saved.offset)
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "a tensor that backward needs was modified by an in-place operation: it has shape"
                f" {tuple(saved.tensor.shape)}, is at version {saved.tensor._version}, but version"
                f" {saved.version} was saved"
            )
        return saved.tensor

    def _is_current(self, bucket: ParameterBucket, offset: int, version: int) -> bool:
        """Whether this is the version of the parameter at a place of a bucket."""
        offsets = self._offsets.get(bucket)
        if offsets is None:
            offsets = self._offsets[bucket] = [slot.offset for slot in bucket.layout.slots]
        slot = bisect_right(offsets, offset) - 1
        return bucket.parameters[slot]._version == version

    def _saved(self) -> AbstractContextManager[None]:
        if not self._by_storage:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)


@contextmanager
def _used(coordinator: ParameterCoordinator, buckets: Sequence[ParameterBucket]) -> Iterator[None]:
    """Inside, buckets are in use by the root module."""
    if not buckets:
        yield
        return
    coordinator.before("", buckets)
    try:
        yield
    finally:
        coordinator.after(buckets)


def _storage_key(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    try:
        return _compat.storage_identity(tensor)
    except (RuntimeError, NotImplementedError):  # a wrapper without storage of its own
        return 0


def _buckets_of(
    parameters: Sequence[nn.Parameter], coordinator: ParameterCoordinator
) -> list[ParameterBucket]:
    """Buckets of parameters, each once, in order."""
    found: dict[int, ParameterBucket] = {}
    for parameter in parameters:
        bucket = coordinator.bucket_of(parameter)
        if bucket is not None:
            found[bucket.layout.index] = bucket
    return list(found.values())
