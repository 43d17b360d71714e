"""Bytes: buffers that are reused, and what is alive."""
