"""The only room that calls collectives."""

from lightning_zero.comm.api import Collectives, Handle
from lightning_zero.comm.groups import ShardGroups

__all__ = ["Collectives", "Handle", "ShardGroups"]
