"""Hydra configuration groups of the recipes, shipped as ``pkg://lightning_zero.conf``."""
