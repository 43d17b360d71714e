"""The native library, built once for all processes that run tests."""

from __future__ import annotations

import pytest

from lightning_zero.ops.libraries import HOST_LIBRARY


@pytest.fixture(scope="session")
def native():
    if not HOST_LIBRARY.is_there():
        pytest.skip("needs a C++ compiler and ninja")
