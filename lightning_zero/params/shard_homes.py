"""Where the shard of a bucket that comes and goes lives between its uses, if not on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from lightning_zero.memory.link import HostLink, Transfer
from lightning_zero.memory.streams import ReadAhead


class ShardHome(ABC):
    """A shard away from the device."""

    shard: Tensor
    """1-D [S] on the CPU, for all who read it now and then."""

    is_memory = True
    """Whether it lies in memory, so that it can be stepped there."""

    def read_ahead(self) -> None:  # noqa: B027  (few have something to do)
        """It is needed soon."""

    @abstractmethod
    def begin(self, own: Tensor) -> None:
        """Start to copy the shard to ``own``, 1-D [S] on the device."""

    @abstractmethod
    def bring(self, own: Tensor) -> None:
        """Have what the device does from now on find the shard there."""

    def read(self) -> Tensor:
        """The values, after an error.

        Raises:
            RuntimeError: They cannot be read.
        """
        return self.shard

    @abstractmethod
    def put(self, values: Tensor) -> None:
        """Overwrite the shard.

        Args:
            values: 1-D [S], any floating dtype and device.
        """

    def note_change(self) -> None:  # noqa: B027
        """Somebody has written to ``shard``."""

    def settle(self) -> None:  # noqa: B027
        """Block until nothing reads the shard any more: it may be written to."""


MakeHome = Callable[[Tensor], ShardHome]
"""Makes the home of a shard, 1-D [S] on the device, with its values."""


class HostShard(ShardHome):
    """A shard in host memory.

    Args:
        shard: 1-D [S] on the device.
        link: The way to the host.
    """

    def __init__(self, shard: Tensor, link: HostLink) -> None:
        self._link = link
        self.shard = link.zeros(shard.numel(), shard.dtype)
        link.to_host(shard, self.shard).wait_on_host()
        self._transfer: Transfer | None = None

    def begin(self, own: Tensor) -> None:
        """See the base class."""
        self._transfer = self._link.to_device(self.shard, own)

    def bring(self, own: Tensor) -> None:
        """See the base class."""
        if self._transfer is None:
            raise AssertionError("a shard was to be there that was not begun to be brought")
        self._transfer.wait()

    def put(self, values: Tensor) -> None:
        """See the base class."""
        self.settle()
        self.shard.copy_(values)

    def settle(self) -> None:
        """See the base class."""
        if self._transfer is not None:
            self._transfer.wait_on_host()


class FileShard(ShardHome):
    """A shard in a file. ``shard`` shows the file; it takes memory only where it is read.

    Args:
        shard: 1-D [S] on the device.
        link: The way to the host.
        reads: Reads of the file.
    """

    is_memory = False

    def __init__(self, shard: Tensor, link: HostLink, reads: ReadAhead) -> None:
        self._link, self._reads = link, reads
        self._nbytes = shard.nbytes
        self._index = reads.stream.add(shard.nbytes)
        self.shard = reads.stream.mapped(self._index)[: shard.nbytes].view(shard.dtype)
        self._version = -1
        self.put(shard)

    def read_ahead(self) -> None:
        """See the base class."""
        self._reads.begin(self._index)

    def begin(self, own: Tensor) -> None:
        """See the base class."""
        self._reads.begin(self._index)

    def bring(self, own: Tensor) -> None:
        """See the base class."""
        read = self._reads.take(self._index)
        try:
            values = read.wait()[: self._nbytes].view(own.dtype)
            self._link.to_device(values, own).wait_on_host()  # before the buffer is used again
        finally:
            read.release()

    def read(self) -> Tensor:
        """See the base class; a mapping of a file that is damaged would end the process."""
        read = self._reads.take(self._index)
        try:
            return read.wait()[: self._nbytes].view(self.shard.dtype).clone()
        finally:
            read.release()

    def put(self, values: Tensor) -> None:
        """See the base class."""
        self._reads.drop(self._index)
        data = values.to("cpu", self.shard.dtype)
        self._reads.stream.window.write(self._index, data)
        self._version = self.shard._version

    def note_change(self) -> None:
        """See the base class."""
        self._reads.drop(self._index)
        if self._version != self.shard._version:  # by way of the mapping
            self._reads.stream.flush()
            self._version = self.shard._version
