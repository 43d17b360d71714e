"""How long something may take before a test takes it for a hang.

[Note: limits and bounds]
A limit guards against hangs. It is many times what the slowest run takes on a quiet machine, as a
machine that is shared may be several times slower. A bound is what a test measures: it counts from
where the behaviour begins, and never covers the start of an interpreter, an import or a set-up.
"""

HANG_S = 600.0
"""Limit of ranks and scripts; a test's own limit is longer, so that it can tell who was waiting."""
