"""Ordinary checkpoints from partitioned states, and back."""
