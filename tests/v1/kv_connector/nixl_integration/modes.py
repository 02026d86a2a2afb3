# SPDX-License-Identifier: Apache-2.0
"""Which modes a test runs in."""

import pytest

PULL_IN_FULL = pytest.mark.parametrize(
    "mode", ["push", pytest.param("pull", marks=pytest.mark.full)]
)
"""For tests of what both modes share: with pull only where all tests run."""
