"""The plain average of gradients: what autograd made on each rank, by one all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_zero import _compat
from lightning_zero.comm import Collectives
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.self_check.copies import Copy, Owners

CLIP_ROUNDING = 1e-5
"""Relative difference of two norms that were summed in another order, at most."""


class _Gradient:
    """The gradient of one parameter on the way to its average."""

    def __init__(self) -> None:
        self.is_used = False
        """Whether this rank has a gradient since it was last cleared."""
        self.is_new = False
        """Whether gradients from before the latest ones were cleared."""
        self.zeroings = 0
        self.pending: Tensor | None = None
        """What this rank has added since the last average."""
        self.average: Tensor | None = None
        """1-D in dense order, the same on all ranks."""
        self.final: Tensor | None = None
        """The average as the optimizer is to step it: clipped, in the dtype of the master."""
        self.count = 0
        """Gradients that were added up."""
        self.magnitude: Tensor | None = None
        """Sum of their largest absolute values."""
        self.rounding = 0.0
        """Largest difference of two sums of these gradients in another order."""

    def restart(self) -> None:
        """Gradients were cleared."""
        self.is_used, self.is_new = False, True
        self.pending, self.count, self.magnitude = None, 0, None

    def add(self, grad: Tensor) -> None:
        """One more gradient of this rank, of the parameter's shape."""
        grad = grad.detach()
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        magnitude = torch.linalg.vector_norm(grad, float("inf")).double()
        self.magnitude = magnitude if self.magnitude is None else self.magnitude + magnitude
        self.pending = grad.clone() if self.pending is None else self.pending.add_(grad)
        self.is_used = True
        self.count += 1


class PlainAverages:
    """Averages gradients beside the engine.

    Args:
        copies: Parameters that are trained.
        table: Tells which gradients were cleared.
        owners: Sums over the ranks.
        collectives: Group over which the ranks agree.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        table: PieceTable,
        owners: Owners,
        collectives: Collectives,
    ) -> None:
        self._table = table
        self._owners = owners
        self._collectives = collectives
        self._gradients = {copy: _Gradient() for copy in copies}
        self._handles = [
            _compat.watch_gradient(copy.parameter, self._hook_of(copy)) for copy in copies
        ]

    def close(self) -> None:
        """Watch no more, and free everything."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._gradients = {}

    def settle(self, copies: Sequence[Copy]) -> None:
        """Average what has come since the last time; for all ranks to call.

        Args:
            copies: Parameters of one optimizer.
        """
        if not copies:
            return
        for copy in copies:
            self._look_for_clearing(copy)
        gradients = [self._gradients[copy] for copy in copies]
        numbers = [
            float(number)
            for gradient in gradients
            for number in (
                gradient.is_used,
                gradient.is_new,
                gradient.count,
                0.0 if gradient.magnitude is None else gradient.magnitude,
            )
        ]
        device = copies[0].parameter.device
        agreed = torch.tensor(numbers, dtype=torch.float64, device=device)
        self._collectives.agree(agreed)
        rows = agreed.reshape(-1, 4).tolist()
        for copy, gradient, (used, new, count, magnitude) in zip(
            copies, gradients, rows, strict=True
        ):
            if new or not used:
                gradient.average = None
            gradient.is_new = False
            if not used:
                gradient.final = None
            gradient.rounding = count * self._eps(copy) * magnitude / self._collectives.world_size
        used_copies = [copy for copy, row in zip(copies, rows, strict=True) if row[0]]
        self._average(used_copies)

    def final(self, copy: Copy) -> Tensor | None:
        """What the optimizer is to step, 1-D in dense order; None if no rank has a gradient."""
        return self._gradients[copy].final

    def rounding(self, copy: Copy) -> float:
        """Largest absolute difference of this gradient that rounding explains."""
        return self._gradients[copy].rounding

    def drop_cleared(self, copies: Iterable[Copy]) -> None:
        """Forget gradients that were cleared and have not come again."""
        for copy in copies:
            gradients, slot = self._table.place[copy.parameter]
            if gradients.is_cleared(slot):
                self._gradients[copy].final = None

    def clip_norm(self, copies: Sequence[Copy], max_norm: float, norm_type: float) -> None:
        """Clip by the norm of these gradients, as plain torch does."""
        finals = [(copy, final) for copy in copies if (final := self.final(copy)) is not None]
        if not finals:
            return
        norm = torch.nn.utils.get_total_norm([final for _, final in finals], norm_type)
        scale = torch.clamp(max_norm / (norm.float() + 1e-6), max=1.0)
        for copy, final in finals:
            self._gradients[copy].rounding *= float(scale)
            final.mul_(scale.to(final.device))
            largest = float(torch.linalg.vector_norm(final, float("inf")))
            self._gradients[copy].rounding += CLIP_ROUNDING * largest

    def scale(self, copies: Iterable[Copy], factor: float) -> None:
        """Multiply gradients."""
        for copy in copies:
            gradient = self._gradients[copy]
            if gradient.final is not None:
                gradient.final.mul_(factor)
                gradient.rounding *= abs(factor)

    def clamp(self, copies: Iterable[Copy], limit: float) -> None:
        """Clip gradients by their values."""
        for copy in copies:
            final = self._gradients[copy].final
            if final is not None:
                final.clamp_(-limit, limit)

    def _hook_of(self, copy: Copy) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            gradient = self._gradients.get(copy)
            place = self._table.place.get(copy.parameter)
            if gradient is None or place is None:
                return
            gradients, slot = place
            gradients.is_cleared(slot)  # looks at whether it was zeroed
            is_zeroed = gradient.zeroings != gradients.zeroings[slot]
            gradient.zeroings = gradients.zeroings[slot]
            is_there = copy.parameter.grad is not None or slot in gradients.kept
            with torch.no_grad():
                if is_zeroed or not (is_there or slot in gradients.arrived):
                    gradient.restart()
                gradient.add(grad)

        return hook

    def _look_for_clearing(self, copy: Copy) -> None:
        """What has no gradient of this rank since it was cleared tells nothing by a hook."""
        gradients, slot = self._table.place[copy.parameter]
        gradient = self._gradients[copy]
        is_cleared = gradients.is_cleared(slot)
        if gradient.zeroings != gradients.zeroings[slot]:
            gradient.zeroings = gradients.zeroings[slot]
            was_used = gradient.is_used
            gradient.restart()
            gradient.is_used = was_used
        elif is_cleared or slot not in gradients.used:
            was_new = gradient.is_new
            gradient.restart()
            gradient.is_new = was_new or is_cleared

    def _average(self, copies: Sequence[Copy]) -> None:
        by_dtype: dict[torch.dtype, list[Copy]] = {}
        for copy in copies:
            dtype = self._table.place[copy.parameter][0].shard_dtype
            by_dtype.setdefault(dtype, []).append(copy)
        for dtype, alike in by_dtype.items():
            pending = {copy: self._gradients[copy].pending for copy in alike}
            for copy, total in zip(alike, self._owners.summed(pending, dtype), strict=True):
                gradient, master = self._gradients[copy], self._table.master_of(copy.parameter)
                if master is None:
                    raise AssertionError(f"{copy.name} is not trained")
                before = gradient.average
                gradient.average = total if before is None else before.add_(total)
                gradient.final = gradient.average.to(master.tensor.dtype)
                gradient.pending = None

    def _eps(self, copy: Copy) -> float:
        """Rounding of one sum: by the dtype of gradients, or in which they travel."""
        gradients, _ = self._table.place[copy.parameter]
        dtypes = (copy.parameter.dtype, gradients.wire_dtype)
        return max(torch.finfo(dtype).eps for dtype in dtypes)
