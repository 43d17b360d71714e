"""ZenFlow: important columns are stepped on the device, the rest on the host and less often."""

from lightning_zero.optim.zenflow.master import ZenFlowMaster
from lightning_zero.optim.zenflow.updater import ZenFlowUpdater, check_zenflow

__all__ = ["ZenFlowMaster", "ZenFlowUpdater", "check_zenflow"]
