"""What the optimizer steps for each bucket, on the device or on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.homes import HostHome
from lightning_zero.memory.link import HostLink, Staging, Transfer
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.params.dense import stamp
from lightning_zero.plan.layout import Piece


class MasterShard:
    """The tensor that the optimizer steps for one bucket: the shard itself, or an fp32 copy.

    Args:
        parameters: Bucket of the parameters.
        gradients: The same bucket's gradients.
        has_copy: Keep an fp32 copy of a shard of lower precision.
    """

    is_on_host = False
    """It is stepped in host memory."""

    is_in_memory = True
    """It lives in memory between steps, and so do the optimizer's states."""

    def __init__(
        self, parameters: ParameterBucket, gradients: GradientBucket, has_copy: bool
    ) -> None:
        self.parameters = parameters
        self.gradients = gradients
        self.has_copy = has_copy and parameters.dtype.itemsize < 4
        """Whether it is more precise than the parameters."""
        self.tensor = self._make()
        self._step_grad: Tensor | None = None
        self._zeroed = 0

    def _make(self) -> Tensor:
        shard = self.parameters.shard
        return shard.float() if self.has_copy else shard

    @property
    def is_apart(self) -> bool:
        """Whether it takes memory of its own."""
        return self.has_copy

    @property
    def step_grad(self) -> Tensor:
        """Gradient in the dtype of the master, 1-D [S]; a copy only where the dtypes differ."""
        found = self._made_grad()
        if found is None:
            self._zeroed = self.gradients.times_zeroed
            found = self._step_grad = self._make_grad()
        return found

    @property
    def grad_as_is(self) -> Tensor:
        """Gradient to be read, 1-D [S], in the dtype it has."""
        found = self._made_grad()
        return self.gradients.shard_grad if found is None else found

    def _made_grad(self) -> Tensor | None:
        return self._step_grad if self._zeroed == self.gradients.times_zeroed else None

    def _make_grad(self) -> Tensor:
        return self.gradients.shard_grad.to(self.tensor.dtype)

    def scale_grad(self, piece: Piece, factor: Tensor) -> None:
        """Multiply the gradient of a piece.

        Args:
            piece: One of this rank's.
            factor: 0-d fp32.
        """
        grad = self.step_grad[piece.shard_offset : piece.shard_offset + piece.numel]
        grad.mul_(factor.to(grad.device))

    def room_for_state(self, key: str, dtype: torch.dtype) -> Tensor | None:
        """Where a state that comes from elsewhere is to be written, 1-D [S]; None for anywhere.

        Args:
            key: Its name in the optimizer.
            dtype: Its dtype.
        """
        return None

    def bring_together(self) -> None:
        """What is to be stepped elsewhere is in ``tensor`` and in the optimizer's states after it.

        For whoever looks at states, or is about to write to them.
        """

    def on_device(self) -> list[Tensor]:
        """Of a master on the host: what it keeps on the device beside."""
        return []

    def release(self) -> None:
        """Free a master that says no more than the parameters; any other may be saved yet."""
        self.drop_step_grad()
        if not self.has_copy:
            self.tensor = torch.empty(0, device=self.tensor.device)

    def drop_step_grad(self) -> None:
        """Forget the gradient; the next use takes it from the bucket again."""
        self._step_grad = None

    def store(self) -> None:
        """The master has been stepped: start to write it back into the parameters' shard."""
        if self.has_copy:
            self.parameters.store_shard(self.tensor)

    def end_step(self) -> None:
        """What has been stored is in the parameters' shard from now on."""
        self.drop_step_grad()
        self.parameters.note_update()

    def settle(self) -> None:
        """Wait until nothing reads the master any more, so that it may be stepped."""

    def refresh(self) -> None:
        """Follow the parameters' shard where someone else has written to it; keep the rest."""
        if self.has_copy:
            self._follow(self.parameters.shard)

    def _follow(self, shard: Tensor) -> None:
        was_written = shard != self.tensor.to(shard.dtype)
        torch.where(was_written, shard.to(self.tensor.dtype), self.tensor, out=self.tensor)


class HostMaster(MasterShard):
    """A master in host memory, see [Note: two memories] in ``memory/link.py``.

    Args:
        parameters: Bucket of the parameters.
        gradients: The same bucket's gradients, on the host, too.
        home: Where those gradients are.
        link: The way between the device and the host.
        staging: Host memory for values on their way to the device.
    """

    is_on_host = True

    def __init__(
        self,
        parameters: ParameterBucket,
        gradients: GradientBucket,
        home: HostHome,
        link: HostLink,
        staging: Staging,
    ) -> None:
        self._home = home
        self._link = link
        self._staging = staging
        self._stored: Transfer | None = None
        super().__init__(parameters, gradients, has_copy=True)
        self._revision = parameters.revision
        self.known_stamp = self.stamp_now()
        """What :meth:`stamp_now` has found when this was last in line with the shard."""

    def _make(self) -> Tensor:
        shard = self.parameters.shard
        if not self.is_apart:
            return shard
        if self.has_copy:  # never goes to the device as it is
            master = torch.empty(shard.numel(), dtype=torch.float32)
        else:
            master = self._link.zeros(shard.numel(), shard.dtype)
        self._link.to_host(shard, master).wait_on_host()
        return master

    @property
    def is_apart(self) -> bool:
        """See the base class; a shard on the host that is precise enough is stepped itself."""
        return self.has_copy or self.parameters.home is None or not self.parameters.home.is_memory

    @property
    def grad_as_is(self) -> Tensor:
        """See the base class."""
        return self.step_grad if self._home.factors else super().grad_as_is

    def scale_grad(self, piece: Piece, factor: Tensor) -> None:
        """See the base class; done with the step, or when somebody looks."""
        # One factor after the other: their product would be rounded first.
        is_next = piece.slot in self._home.factors
        if self.has_made_grad or is_next or self.gradients.is_shown:
            super().scale_grad(piece, factor)
        else:
            self._home.scale_later(piece.slot, factor)

    def _make_grad(self) -> Tensor:
        gradients = self.gradients
        if gradients.shard_dtype == self.tensor.dtype:
            self._home.apply_factors(gradients)
            return gradients.shard_grad
        grad = gradients.shard_grad.to(self.tensor.dtype)
        for slot, factor in self._home.factors.items():
            piece = gradients.pieces[slot]
            grad[piece.shard_offset : piece.shard_offset + piece.numel].mul_(factor)
        self._home.factors.clear()
        return grad

    def drop_step_grad(self) -> None:
        """See the base class."""
        self._home.end_step()
        super().drop_step_grad()

    @property
    def factors(self) -> Mapping[int, Tensor]:
        """What gradients are still to be multiplied with, by slot."""
        return self._home.factors

    @property
    def grad_unscaled(self) -> Tensor:
        """Gradient without the factors that are still to come, 1-D [S], in the dtype it has."""
        return super().grad_as_is

    @property
    def has_plain_grad(self) -> bool:
        """Whether the gradient is there in the dtype of the master."""
        return self.has_made_grad or self.gradients.shard_dtype == self.tensor.dtype

    @property
    def has_made_grad(self) -> bool:
        """Whether there is a gradient in the dtype of the master, which may have been changed."""
        return self._made_grad() is not None

    def room_for_copy(self) -> Tensor | None:
        """Where a step may write the new values in the dtype of the parameters, 1-D [S].

        Returns:
            None where they have the dtype of the master. Goes to the device with :meth:`store`.
        """
        return self._room() if self.has_copy else None

    def _room(self) -> Tensor:
        """The shard itself if it lies in host memory, else memory to send it from."""
        here, shard = shard_in_memory(self.parameters, self._link), self.parameters.shard
        return here if here is not None else self._staging.take(shard.numel(), shard.dtype)

    def store(self, copy: Tensor | None = None, is_copied: bool = False) -> None:
        """See the base class; does not wait for the copy to the device.

        Args:
            copy: What :meth:`room_for_copy` has given; None to ask for it.
            is_copied: The step has written all that it stepped to it.
        """
        if not self.is_apart:
            return
        if copy is None:
            copy, is_copied = self.room_for_copy(), False
        if copy is not None and not is_copied:
            copy.copy_(self.tensor)
        self.send(self.tensor if copy is None else copy)

    def send(self, values: Tensor) -> None:
        """Bring new values to the parameters' shard; may be under way when this returns.

        Args:
            values: The master, or what :meth:`room_for_copy` has given.
        """
        shard = self.parameters.shard
        is_staged = values is not self.tensor
        if values is shard_in_memory(self.parameters, self._link):
            return
        if self.parameters.home is not None:  # a file
            self.parameters.store_shard(values)
            if is_staged:
                self._staging.give(values)
        elif is_staged:
            self._stored = self._staging.send(values, shard)
        else:
            self._stored = self._link.to_device(values, shard)

    def end_step(self) -> None:
        """See the base class."""
        if self._stored is not None:
            self._stored.wait()
        super().end_step()
        self._revision = self.parameters.revision
        self.known_stamp = self.stamp_now()

    def settle(self) -> None:
        """Nothing reads the master any more: it may be stepped."""
        if self.parameters.home is not None:
            self.parameters.home.settle()
        if self._stored is not None:
            self._stored.wait_on_host()
            self._stored = None

    def stamp_now(self) -> Tensor | None:
        """A number that changes with the shard, where it may change without a word; 0-d int64."""
        return stamp(self.parameters.shard) if self.parameters.is_resident else None

    @property
    def is_told(self) -> bool:
        """Whether all changes of the shard that one is told of have been followed."""
        return self._revision == self.parameters.revision

    def refresh(self) -> None:
        """See the base class."""
        refresh_together([self])

    def follow_shard(self) -> None:
        """Take in what somebody else has written to the shard."""
        self.settle()
        self._revision = self.parameters.revision
        self.known_stamp = self.stamp_now()
        if not self.is_apart:
            return
        shard = self.parameters.shard
        here = self._link.zeros(shard.numel(), shard.dtype)
        self._link.to_host(shard, here).wait_on_host()
        self._follow(here)


def shard_in_memory(bucket: ParameterBucket, link: HostLink) -> Tensor | None:
    """The shard of a bucket, if it lies in host memory."""
    is_here = link.is_within_memory if bucket.home is None else bucket.home.is_memory
    return bucket.shard if is_here else None


def refresh_together(masters: Iterable[MasterShard]) -> None:
    """As ``refresh`` of each, but waits for the device once.

    Args:
        masters: Masters that are about to be stepped.
    """
    stamped: list[tuple[HostMaster, Tensor, Tensor]] = []
    for master in masters:
        if not isinstance(master, HostMaster):
            master.refresh()
        elif not master.is_told:
            master.follow_shard()
        else:
            now, known = master.stamp_now(), master.known_stamp
            if now is not None and known is not None:
                stamped.append((master, now, known))
            master.settle()
    if stamped:
        is_other = torch.stack([now for _, now, _ in stamped]) != torch.stack(
            [known for _, _, known in stamped]
        )
        for (master, _, _), is_written in zip(stamped, is_other.tolist(), strict=True):
            if is_written:
                master.follow_shard()
