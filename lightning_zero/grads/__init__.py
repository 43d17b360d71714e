"""Gradients: from ``param.grad`` to the averaged gradient of this rank's shard."""
