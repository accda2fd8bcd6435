"""Settings and fixtures of several tests. Property tests draw the same examples every time and have
no deadline, since a test must not fail because the machine is busy."""

import numpy as np
import pytest
import strict_cupy
from hypothesis import settings

settings.register_profile("minispec", deadline=None, derandomize=True)
settings.load_profile("minispec")


@pytest.fixture
def cp(monkeypatch):
    """The strict stand-in for CuPy, in place of cupy."""
    return strict_cupy.install(monkeypatch)


@pytest.fixture
def a(cp):
    """[[0 1 2] [3 4 5]] in float32, on the device, with the counters at zero."""
    array = cp.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    strict_cupy.transfers.reset()
    return array
