# SPDX-License-Identifier: Apache-2.0
"""What is held of the cache is let go of before the engine resets it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


def before_reset(manager: "KVCacheManager", let_go: Callable[[], object]) -> None:
    """Call ``let_go`` whenever the manager's prefix cache is to be reset.

    The engine resets it only while no block is in use, and asks nobody before.
    """
    reset = manager.reset_prefix_cache

    def let_go_and_reset() -> bool:
        let_go()
        done: bool = reset()
        return done

    manager.reset_prefix_cache = let_go_and_reset
