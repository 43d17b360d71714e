"""ZeRO for Lightning Fabric: ``Fabric(strategy=lightning_zero.fabric.ZeroStrategy(stage=3))``."""

from lightning_zero.fabric.strategy import ZeroStrategy

__all__ = ["ZeroStrategy"]
