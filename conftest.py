# SPDX-License-Identifier: Apache-2.0
"""Orders tests: those that start real engines come last."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("distributed") is not None)
