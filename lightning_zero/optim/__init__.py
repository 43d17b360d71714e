"""Changing master weights: pieces instead of parameters, norms over all ranks, loss scaling."""
