"""The only room that calls collectives."""

from lightning_zero.comm.api import Collectives, Gathers, Handle
from lightning_zero.comm.groups import ProcessGroup, ShardGroups
from lightning_zero.comm.reads import ShardReads

__all__ = ["Collectives", "Gathers", "Handle", "ProcessGroup", "ShardGroups", "ShardReads"]
