"""SuperOffload: the host steps buckets while backward goes on, and takes back what was wrong.

[Note: speculation]
A step on the host needs the norm of all gradients, and to know that none of them has overflowed,
which nobody does before backward has ended. Mostly neither changes anything. So a worker steps each
bucket as its gradient comes, as if nothing would, and keeps what was there before. In the optimizer
step that follows, what was assumed is held against what is: if it is the same, new values go to the
parameters; if not, the step is taken back and made anew. Parameters see confirmed values only.

Whoever looks at states, or is about to write to them or to the gradient, has it taken back first.
After an assumption that was wrong a bucket waits until one would have been right: where each step
is clipped, all of it is stepped after backward, as without speculation.

Source: SuperOffload (arXiv:2509.21271), speculation-then-validation.
"""

from lightning_zero.optim.superoffload.master import SuperMaster
from lightning_zero.optim.superoffload.speculation import HostSteps, Speculation
from lightning_zero.optim.superoffload.updater import SuperOffloadUpdater, check_super_offload

__all__ = [
    "HostSteps",
    "Speculation",
    "SuperMaster",
    "SuperOffloadUpdater",
    "check_super_offload",
]
