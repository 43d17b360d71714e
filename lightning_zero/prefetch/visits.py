"""Reads of weights outside of any step: by the user's own code between two steps.

[Note: loading]
``load_state_dict`` goes from module to module, and lists the parameters of each before it writes to
them. So while weights are loaded, listing brings the buckets of a module in, and sends away those
of the modules before, with what was written to them. All ranks load the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.params.dense import fingerprint
from lightning_zero.prefetch.residency import Residency


class Visits:
    """Buckets that were brought in for somebody who reads weights outside of a step.

    They stay until the next step begins, since nobody tells when the reader has done; what was
    written to them until then is kept.

    Args:
        residency: Brings buckets in.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._opened: list[tuple[ParameterBucket, int | None]] = []
        self.is_left_alone = False
        """Whether state dicts list placeholders, instead of bringing buckets in."""
        self.is_loading = False
        """Whether a module that is listed is about to be written to, see [Note: loading]."""

    def bring(self, bucket: ParameterBucket) -> None:
        """Bring a bucket in, if it is not here, and keep it until the next step."""
        if self.holds(bucket):
            return
        self._residency.start(bucket, "forward")
        self._residency.wait(bucket, "forward")
        found = None
        if self.is_loading:
            bucket.forget_writes(was_written=True)  # it is going to be
        else:
            found = fingerprint(bucket.flat)
        self._opened.append((bucket, found))

    def holds(self, bucket: ParameterBucket) -> bool:
        """Whether somebody may still read or write a bucket outside of a step."""
        return any(bucket is opened for opened, _ in self._opened)

    def settle(self) -> None:
        """Give everything back."""
        self.keep_only(())

    def keep_only(self, wanted: Collection[ParameterBucket]) -> None:
        """Give everything back but these buckets."""
        leaving = [(bucket, found) for bucket, found in self._opened if bucket not in wanted]
        self._opened = [(bucket, found) for bucket, found in self._opened if bucket in wanted]
        for bucket, found in leaving:
            self._residency.give_back(bucket, found=found)

    def drop(self) -> None:
        """Forget what was brought in, after an error."""
        self._opened = []

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Weights are loaded inside, on all ranks; after an error the last module has its old ones.

        See [Note: loading].
        """
        self.settle()
        self.is_loading = True
        try:
            yield
            self.settle()
        except BaseException:
            for bucket, _ in self._opened:  # without a word to other ranks, which may be gone
                bucket.forget_writes()
                self._residency.give_back(bucket)
            self.drop()
            raise
        finally:
            self.is_loading = False

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """State dicts and listings that are made inside have placeholders; for who knows them."""
        was_left_alone, self.is_left_alone = self.is_left_alone, True
        try:
            yield
        finally:
            self.is_left_alone = was_left_alone
