# SPDX-License-Identifier: Apache-2.0
"""The connectors under measurement: the real ones, with a clock at their edges.

Nothing is replaced. Hooks that the forward thread calls add up its CPU time; the
agent notes when NIXL is entered for a WRITE or READ and what was sent and heard.
"""

import functools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import (
    Agent,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import AgentName
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import WireError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Done,
    ReadConfirmed,
    Register,
    decode_packet,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.role import NixlWorker

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_block_frees",
    "has_pending_push_work",
)
WORKER_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


class HookCost:
    """CPU nanoseconds of the forward thread in each hook since the last take."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._depth = 0

    def timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook`` with its thread's CPU time added up under ``name``."""

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return hook(*args, **kwargs)
            self._depth += 1
            start = time.thread_time_ns()
            try:
                return hook(*args, **kwargs)
            finally:
                self._spent[name] += time.thread_time_ns() - start
                self._depth -= 1

        return call

    def take(self) -> dict[str, int]:
        """What was spent, by hook."""
        spent = dict(self._spent)
        self._spent.clear()
        return spent


COST = HookCost()
"""One forward thread per process calls hooks."""


def _timed_hooks(kind: type[NixlBaseConnector]) -> dict[str, Any]:
    return {
        name: COST.timed(name, getattr(kind, name))
        for name in (*SCHEDULER_HOOKS, *WORKER_HOOKS)
    }


@dataclass(frozen=True)
class Post:
    """One call by which NIXL was told to move bytes; times in nanoseconds.

    ``attempt`` is the ``registration_id``; empty for a READ.
    """

    attempt: str
    entered: int
    left: int
    bytes: int


class Stamps:
    """When things happened, on the clock that all processes of a host share."""

    def __init__(self) -> None:
        self.posts: deque[Post] = deque(maxlen=1 << 16)
        self.registered: dict[str, int] = {}
        """Attempt by ``registration_id``: when its Register had been sent."""
        self.heard: dict[str, int] = {}
        """Attempt: when its latest piece was taken from NIXL by the receiver."""
        self.page_bytes = 0
        """Bytes of one page of the cache in use."""


STAMPS = Stamps()


class _StampedNixl:
    """NIXL's own agent; posting is stamped."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.entered = 0
        self.left = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def transfer(self, handle: Any) -> Any:
        self.entered = time.monotonic_ns()
        state = self._agent.transfer(handle)
        self.left = time.monotonic_ns()
        return state


class StampedAgent(Agent):
    """The agent, with stamps at what crosses to NIXL and back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nixl = self._agent = _StampedNixl(self._agent)

    def post(
        self,
        operation: str,
        local: Any,
        local_indices: BlockArray,
        remote: Any,
        remote_indices: BlockArray,
        notification: bytes,
    ) -> tuple[Any, TransferState]:
        """See :meth:`Agent.post`."""
        result = super().post(
            operation, local, local_indices, remote, remote_indices, notification
        )
        size = len(local_indices) * STAMPS.page_bytes
        attempt = ""
        if notification:
            body = decode_packet(notification).body
            assert isinstance(body, Done), body
            attempt = body.registration_id
        post = Post(attempt, self._nixl.entered, self._nixl.left, size)
        STAMPS.posts.append(post)
        return result

    def notify(self, peer: AgentName, message: bytes) -> None:
        """See :meth:`Agent.notify`."""
        super().notify(peer, message)
        now = time.monotonic_ns()
        body = decode_packet(message).body
        if isinstance(body, Register):
            STAMPS.registered.setdefault(body.registration_id, now)

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        """See :meth:`Agent.notifications`."""
        received = super().notifications()
        now = time.monotonic_ns()
        for _, message in received:
            try:
                body = decode_packet(message).body
            except WireError:
                continue
            if isinstance(body, Done | ReadConfirmed):
                STAMPS.heard[body.registration_id] = now
        return received


class MeasuredWorker(NixlWorker):
    """The worker role on a stamped agent."""

    agent_class = StampedAgent


class MeasuredPushConnector(NixlPushConnector):
    """Push under measurement."""

    worker_class = MeasuredWorker


class MeasuredPullConnector(NixlPullConnector):
    """Pull under measurement."""

    worker_class = MeasuredWorker


for _kind in (MeasuredPushConnector, MeasuredPullConnector):
    for _name, _hook in _timed_hooks(_kind).items():
        setattr(_kind, _name, _hook)
