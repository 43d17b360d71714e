"""A process beside a rank that steps what is in host memory while the rank trains.

[Note: a worker]
The two share memory that has no name and goes with its last user, so nothing is left behind however
a run ends. What is to be done is said in typed messages, done in their order, and answered. The
worker knows nothing of training: it sees tensors and steps them. It ends when the rank closes it,
and by itself when the rank is gone.
"""

from lightning_zero.worker.host_worker import HostWorker, Ticket, WorkerDied
from lightning_zero.worker.jobs import (
    AccumulateJob,
    AdamJob,
    AdamOptions,
    AdamUndoJob,
    ColumnsJob,
    Job,
)
from lightning_zero.worker.shared import Shared

__all__ = [
    "AccumulateJob",
    "AdamJob",
    "AdamOptions",
    "AdamUndoJob",
    "ColumnsJob",
    "HostWorker",
    "Job",
    "Shared",
    "Ticket",
    "WorkerDied",
]
