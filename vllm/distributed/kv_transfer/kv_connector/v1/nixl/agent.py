# SPDX-License-Identifier: Apache-2.0
"""The one module that speaks to NIXL.

An agent belongs to the transfer thread once it is registered; its calls are not
synchronised with each other.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np

from vllm.logger import init_logger

from .ids import AgentName
from .layout import MemoryRange, Row
from .wire.blocks import BlockArray
from .wire.codec import printable

logger = init_logger(__name__)

_UCX_DEFAULTS = {
    # Without it, a cut network link is not noticed for minutes.
    "UCX_TCP_USER_TIMEOUT": "10s",
}

_CLOSING_ROUNDS = 10

_WHY_NOT = "NIXL_LOG_LEVEL=INFO shows why a plugin does not load."


class AgentError(RuntimeError):
    """NIXL refused a call."""


class PeerDisconnected(AgentError):
    """The transport reports that the peer's connection is broken."""


class TransferState(Enum):
    """State of a posted transfer."""

    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


class Agent:
    """A NIXL agent with its registered memory.

    Args:
        name: unique per incarnation; peers address this rank by it.
        backends: NIXL backends to create.
        num_threads: worker threads of the backend.
        progress_thread: whether NIXL runs its own; on CPU it would busy-poll a core.

    Raises:
        AgentError: NIXL is missing, or a backend cannot be created.
    """

    def __init__(
        self,
        name: AgentName,
        backends: Sequence[str],
        num_threads: int,
        progress_thread: bool,
    ) -> None:
        if "UCX" in backends:
            for key, value in _UCX_DEFAULTS.items():
                os.environ.setdefault(key, value)
        utils = importlib.import_module("vllm.distributed.nixl_utils")
        if utils.NixlWrapper is None:
            raise AgentError("NIXL cannot be imported; install the nixl package")
        api = sys.modules[utils.NixlWrapper.__module__]
        self._disconnected: type[Exception] = api.nixlBind.nixlRemoteDisconnectError
        sync = api.nixl_thread_sync_t
        config = utils.nixl_agent_config(
            enable_prog_thread=progress_thread,
            num_threads=num_threads,
            backends=list(backends),
            sync_mode=sync.NIXL_THREAD_SYNC_STRICT
            if progress_thread or num_threads
            else sync.NIXL_THREAD_SYNC_NONE,
        )
        self.name = name
        try:
            self._agent: Any = self._call(lambda: utils.NixlWrapper(name, config))
        except AgentError as error:
            # A plugin that is there and does not load.
            raise AgentError(
                f"NIXL backends {list(backends)} could not be created: {error}. "
                f"{_WHY_NOT}"
            ) from error
        missing = [b for b in backends if b not in self._agent.backends]
        if missing:
            raise AgentError(
                f"NIXL backends {missing} could not be created; "
                f"available plugins: {sorted(self._agent.plugin_list)}. "
                f"{_WHY_NOT}"
            )
        self._backends = list(backends)
        self._registered: list[Any] = []
        self._mem_type = "DRAM"

    def register(self, ranges: Sequence[MemoryRange], mem_type: str) -> None:
        """Register memory; ``mem_type`` is NIXL's (``DRAM``, ``VRAM``)."""
        self._mem_type = mem_type
        for item in ranges:
            self._registered.append(self._register(item))

    def _register(self, item: MemoryRange) -> Any:
        extent = [(item.address, item.length, item.device_id, "")]
        descs = self._call(lambda: self._agent.get_reg_descs(extent, self._mem_type))
        self._call(lambda: self._agent.register_memory(descs, backends=self._backends))
        return descs

    def metadata(self) -> bytes:
        """What a peer needs to address this agent."""
        data: bytes = self._agent.get_agent_metadata()
        return data

    def add_peer(self, metadata: bytes) -> AgentName:
        """Make a peer known; connects lazily."""
        name = self._call(lambda: self._agent.add_remote_agent(metadata))
        return AgentName(_text(name))

    def remove_peer(self, peer: AgentName) -> None:
        """Forget a peer; its descriptor lists and open transfers become invalid."""
        self._call(lambda: self._agent.remove_remote_agent(peer))

    def prepare(
        self, rows: Sequence[Row], mem_type: str, peer: AgentName | None
    ) -> Any:
        """A prepared list of the rows' descriptors, local where ``peer`` is None."""
        table = [(r.address, r.length, r.device_id, r.stride, r.count) for r in rows]
        return self._call(
            lambda: self._agent.prep_xfer_dlist(
                peer or "NIXL_INIT_AGENT", np.array(table, dtype=np.uint64), mem_type
            )
        )

    def release_prepared(self, prepared: Any) -> None:
        """Give a prepared list back."""
        self._call(prepared.release)

    def post(
        self,
        operation: str,
        local: Any,
        local_indices: BlockArray,
        remote: Any,
        remote_indices: BlockArray,
        notification: bytes,
    ) -> tuple[Any, TransferState]:
        """Start a ``WRITE`` or ``READ``; returns its handle and first state.

        Raises:
            PeerDisconnected, AgentError: nothing was started.
        """
        handle = self._call(
            lambda: self._agent.make_prepped_xfer(
                operation,
                local,
                local_indices,
                remote,
                remote_indices,
                notification,
                self._backends,
            )
        )
        try:
            return handle, _STATES[self._call(lambda: self._agent.transfer(handle))]
        except AgentError:
            self.release(handle)
            raise

    def check(self, handle: Any) -> TransferState:
        """Drive a transfer and tell its state; raises as :meth:`post`."""
        return _STATES[self._call(lambda: self._agent.check_xfer_state(handle))]

    def release(self, handle: Any) -> None:
        """Give an ended transfer's handle back."""
        try:
            self._call(handle.release)
        except AgentError as error:
            logger.warning("NIXL did not release a transfer handle: %s", error)

    def notify(self, peer: AgentName, message: bytes) -> None:
        """Send one notification; raises as :meth:`post`."""
        self._call(lambda: self._agent.send_notif(peer, message))

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        """Take what has arrived, and let the transport make progress."""
        received = self._call(self._agent.get_new_notifs)
        return [
            (AgentName(_text(peer)), message)
            for peer, messages in received.items()
            for message in messages
        ]

    def close(self) -> None:
        """Deregister memory and drop the agent."""
        # UCX ends the whole process if it still has requests for a connection that
        # broke; they are given up by its progress.
        for _ in range(_CLOSING_ROUNDS):
            try:
                self.notifications()
            except AgentError:
                break
        for descs in self._registered:
            self._deregister(descs)
        self._registered.clear()
        self._agent = None

    def _deregister(self, descs: Any) -> None:
        try:
            self._call(lambda: self._agent.deregister_memory(descs))
        except AgentError as error:
            logger.warning("NIXL did not deregister memory: %s", error)

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except self._disconnected as error:
            raise PeerDisconnected(str(error)) from error
        except Exception as error:
            raise AgentError(f"{type(error).__name__}: {error}") from error


def _text(name: str | bytes) -> str:
    # A peer may choose what is no text, or no line; nobody knows it by that then.
    text = name.decode(errors="backslashreplace") if isinstance(name, bytes) else name
    return printable(text)


_STATES = {
    "DONE": TransferState.DONE,
    "PROC": TransferState.RUNNING,
    "ERR": TransferState.FAILED,
}
