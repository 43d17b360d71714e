"""Compares the first steps with an unsharded replica, see :class:`SelfCheck`."""

from lightning_zero.self_check.check import SelfCheck
from lightning_zero.self_check.findings import Difference, Kind, Report

__all__ = ["Difference", "Kind", "Report", "SelfCheck"]
