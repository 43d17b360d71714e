"""Parameters spread over the ranks while no engine trains them: when a model is built, and after.

[Note: all alike]
While a model is built all ranks run the same code with the same random numbers, so they hold the
same values whenever a parameter is whole, and each keeps its slice when the parameter goes. What is
read again is gathered by all ranks together. Which parameters are whole is decided from the calls
alone (``plan.slices.WholeParameters``), so that all ranks agree on it. What only one rank sees,
that somebody still holds a parameter, only delays when this rank gives the memory back.

[Note: in hand]
``torch.equal(a.weight, b.weight)`` has the first weight in hand while the second one comes, a loop
over two models has one parameter of each. A parameter in hand stays whole for a while, though its
turn to go has come: one that was read by name if no more than a few others do so, else one of the
module that was used before this one. One of which somebody has a view stays as long as the view.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_zero import _compat
from lightning_zero.params import parameter_dict
from lightning_zero.params.parameter_dict import ZeroParameterDict
from lightning_zero.params.slice import Place, Slice, is_sliceable
from lightning_zero.params.slice_transfers import SliceTransfers
from lightning_zero.params.values import WHOLE
from lightning_zero.plan.layout import Slot
from lightning_zero.plan.slices import WholeParameters

HELD_COUNT = 8
"""Parameters that stay whole because somebody who has read them by name holds them, at most."""


class SlicedParameters:
    """The one owner of slices.

    Args:
        transfers: Brings slices together.
        bucket_numel: Capacity of a bucket in elements; None for the default of the model's size.
    """

    def __init__(self, transfers: SliceTransfers, bucket_numel: int | None) -> None:
        self.transfers = transfers
        self._cut_over = (transfers.rank, transfers.world_size)
        self._whole = WholeParameters(bucket_numel)
        self._slices: MutableMapping[nn.Parameter, Slice] = WeakTensorKeyDictionary()
        self._by_serial: weakref.WeakValueDictionary[Any, Slice] = weakref.WeakValueDictionary()
        self._leaving: list[Slice] = []
        self._listed: list[Slice] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._serial = 0
        self._group = self._turn = 0
        self._is_held = self._is_busy = False
        self.is_open = False
        """Whether a model is being built: what is listed is whole, what is set is known."""

    # Watching modules.

    def watch(self, module: nn.Module) -> None:
        """See the parameters of a module come, and being read."""
        if isinstance(module._parameters, SlicedParameterDict):
            return
        own = SlicedParameterDict(module._parameters, self, self.next_serial(), type(module))
        module._parameters = own
        self._modules.add(module)
        for parameter in own.plain().values():
            known = None if parameter is None else self._slices.get(parameter)
            if known is not None:
                known.add_home(own)

    def unwatch(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Give these modules, or all that were watched, their own dicts back."""
        for module in list(self._modules) if modules is None else modules:
            own = module._parameters
            if isinstance(own, SlicedParameterDict) and own.owner is self:
                module._parameters = own.plain()
            self._modules.discard(module)

    def next_serial(self) -> int:
        """A number that no parameter and no dict has."""
        self._serial += 1
        return self._serial

    def arrive(self, own: SlicedParameterDict, name: str, parameter: nn.Parameter) -> None:
        """A parameter is about to be put into a module."""
        if not self.is_open or not is_sliceable(parameter):
            return
        known = self._slices.get(parameter)
        if known is None:
            known = Slice(parameter, f"{own.label}.{name}", self.next_serial())
            self._slices[parameter] = self._by_serial[known.serial] = known
            self._whole.saw(known.numel)
            self._whole.use(known.serial, known.numel, own.serial)
            self.use(own.serial, [parameter])
        elif known.serial in self._whole:
            self.use(own.serial, [parameter])
        known.add_home(own)

    def depart(self, parameter: nn.Parameter) -> None:
        """A parameter is about to be replaced in a module by another one."""
        known = self._slices.get(parameter)
        if known is not None and known.serial in self._whole:
            self._whole.drop(known.serial)
            self._part_with([known.serial])

    def use(self, group: int, parameters: Sequence[nn.Parameter], by_name: bool = False) -> None:
        """Have parameters whole, and remember that they were used together.

        Args:
            group: Serial of the module that they were used with.
            parameters: The parameters; what this owner does not hold is left alone.
            by_name: Whether somebody asked for one of them, and may have it in hand for a while.
        """
        found = [self._slices.get(parameter) for parameter in parameters]
        slices = [known for known in found if known and known.place is not Place.BUCKET]
        if group != self._group:
            self._group, self._turn = group, self._turn + 1
        for known in slices:
            known.by_name, known.turn = by_name, self._turn
        was_busy, self._is_busy = self._is_busy, True
        try:
            self._settle()
            self._have_whole(group, slices)
        finally:
            self._is_busy = was_busy

    def _have_whole(self, group: int, slices: Sequence[Slice]) -> None:
        absent = [known for known in slices if known.serial not in self._whole]
        for known in slices:
            if known not in absent:
                self._whole.use(known.serial, known.numel, group)
        incoming_numel = sum(known.numel for known in absent)
        if not self._is_held:
            self._send_away(self._whole.leaving(incoming_numel, keep=group))
        if absent:
            self._bring(absent)
        for known in absent:
            self._whole.use(known.serial, known.numel, group)

    def list_all(self, own: Any) -> None:
        """The parameters of a module, given by its dict, are about to be listed."""
        parameters = [parameter for parameter in own.plain().values() if parameter is not None]
        if self.is_open:
            self.use(own.serial, parameters)
            return
        self._follow_listed()
        found = [self._slices.get(parameter) for parameter in parameters]
        self._listed = [known for known in found if known is not None]

    def make_room(self, numel: int) -> None:
        """So many elements are about to be allocated, by others than this owner."""
        if not self._is_busy:
            self._send_away(self._whole.leaving(numel))

    @contextmanager
    def held(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """While inside, parameters are whole together; what is written to them is kept."""
        with self.opened():
            self._is_held = True
            try:
                self.use(0, list(parameters))
                yield
            finally:
                self._is_held = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While inside, a model may be built, initialized or loaded; nothing is whole after."""
        if self.is_open:
            yield
            return
        self._follow_listed()
        self.is_open = True
        try:
            yield
        finally:
            self.rest()
            self.is_open = False

    def rest(self) -> None:
        """Leave nothing whole."""
        self._follow_listed()
        self._part_with(self._whole.clear())
        leaving, self._leaving = self._leaving, []
        for known in leaving:
            known.cut(*self._cut_over)

    # Asking.

    @property
    def parameters(self) -> dict[int, nn.Parameter]:
        """The parameters whose values are with this owner now, by serial."""
        return {known.serial: p for p, known in list(self._slices.items()) if self.holds(p)}

    def known(self, parameter: nn.Parameter) -> Slice | None:
        """What is known of a parameter; None for one that was not built with this owner."""
        return self._slices.get(parameter)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's values are with this owner now."""
        known = self._slices.get(parameter)
        return known is not None and known.place is not Place.BUCKET

    def overwrite(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Give a parameter it holds new values of its shape, the same on all ranks."""
        self._slices[parameter].overwrite(values, *self._cut_over)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make parameters whole and have no more to do with them. For all ranks, in one order."""
        self.rest()
        for parameter in parameters:
            if self.holds(parameter):
                self._bring([self._slices[parameter]])
            self._slices.pop(parameter, None)

    # As the values of buckets, see ``params.values.Values``.

    def stride(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See :class:`Values`."""
        known = self._slices.get(parameter)
        return WHOLE.stride(parameter) if known is None else known.stride

    def take(
        self, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], begin: int, end: int
    ) -> Tensor:
        """See :class:`Values`."""
        pairs = list(zip(slots, parameters, strict=True))
        sliced = [(slot, self._slices[p]) for slot, p in pairs if self.holds(p)]
        plain = [(slot, p) for slot, p in pairs if not self.holds(p)]
        if not sliced:
            return WHOLE.take(slots, parameters, begin, end)
        out = self.transfers.take([slot for slot, _ in sliced], [s for _, s in sliced], begin, end)
        WHOLE.write([slot for slot, _ in plain], [p for _, p in plain], out, begin)
        return out

    def give_back(self, parameter: nn.Parameter, view: Tensor) -> None:
        """See :class:`Values`."""
        known = self._slices.get(parameter)
        if known is None:
            WHOLE.give_back(parameter, view)
            return
        parameter.data = view
        known.place = Place.WHOLE
        known.cut(*self._cut_over)

    # Bringing parameters in, and sending them away.

    def _bring(self, slices: Sequence[Slice]) -> None:
        self.transfers.make_whole(slices)
        self._leaving = [known for known in self._leaving if known not in slices]

    def _send_away(self, serials: Iterable[Hashable]) -> None:
        self._part_with(serials)
        self._settle()

    def _part_with(self, serials: Iterable[Hashable]) -> None:
        """Parameters are whole no more as far as the ranks agree; their memory is to go."""
        for serial in serials:
            known = self._by_serial.get(serial)
            if known is not None:
                known.seal()
                self._leaving.append(known)

    def _settle(self) -> None:
        """Cut what nobody holds any more, see [Note: in hand]."""
        staying: list[Slice] = []
        in_hand = 0
        for known in reversed(self._leaving):
            if not known.is_aliased():
                is_recent = known.turn >= self._turn - 1
                may_stay = is_recent or (known.by_name and in_hand < HELD_COUNT)
                if not may_stay or not known.is_held():
                    known.cut(*self._cut_over)
                    continue
                in_hand += 1
            staying.append(known)
        self._leaving = staying[::-1]

    def _follow_listed(self) -> None:
        listed, self._listed = self._listed, []
        for known in listed:
            known.follow(*self._cut_over)


class SlicedParameterDict(ZeroParameterDict):
    """The ``_parameters`` of a module whose parameters have an owner of slices.

    Args:
        parameters: The module's own dict.
        owner: Told of each read, listing, and new parameter.
        serial: Number of the module, the same on all ranks.
        kind: Class of the module.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter | None],
        owner: SlicedParameters,
        serial: int,
        kind: type[nn.Module],
    ) -> None:
        super().__init__(parameters, partial(_read, owner, serial), owner.list_all)
        self.owner, self.serial, self._kind = owner, serial, kind

    @property
    def label(self) -> str:
        """What errors call the module."""
        return self._kind.__name__

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        old = self.plain().get(name)
        if old is not None and old is not parameter:
            self.owner.depart(old)
        del old
        if parameter is not None:
            self.owner.arrive(self, name, parameter)
        super().__setitem__(name, parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        if not self.owner.is_open:
            return super().__deepcopy__(memo)
        twin = SlicedParameterDict({}, self.owner, self.owner.next_serial(), self._kind)
        for name, parameter in self.plain().items():
            if parameter is not None:
                self.owner.use(self.serial, [parameter])
            twin[name] = copy.deepcopy(parameter, memo)
        return twin


def _read(owner: SlicedParameters, group: int, parameter: nn.Parameter) -> None:
    if not _compat.is_registering(depth=3):
        owner.use(group, [parameter], by_name=True)


def owner_of(root: nn.Module) -> SlicedParameters | None:
    """The owner of the slices of a model; None if its parameters are not sliced."""
    for module in root.modules():
        if isinstance(module._parameters, SlicedParameterDict):
            return module._parameters.owner
    return None


@contextmanager
def opened(root: nn.Module | None) -> Iterator[None]:
    """While inside, a sliced model may be loaded, module by module."""
    slices = None if root is None else owner_of(root)
    with nullcontext() if slices is None else slices.opened():
        yield


def watch_again(owner: SlicedParameters, root: nn.Module) -> None:
    """Watch the modules of a model that hold parameters of the owner."""
    for module in root.modules():
        own = parameter_dict.plain(module).values()
        if any(parameter is not None and owner.holds(parameter) for parameter in own):
            owner.watch(module)
