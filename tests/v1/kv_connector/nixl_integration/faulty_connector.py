# SPDX-License-Identifier: Apache-2.0
"""Connectors whose transport misbehaves on demand; loaded by engines of tests only.

What is to go wrong is read from the file that ``KVFORK_FAULT_CONTROL`` names, and
again whenever that changes; see :mod:`fault_rules`.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fault_rules import ANY, CONTROL_VARIABLE, Event, Plan, Rule, Where, events_path
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import (
    Agent,
    AgentError,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    NixlConnectorMetadata,
    Receive,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import Action
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
    ReceiverTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import AgentName
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import CacheLayout
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import Facts
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
    Handshake,
    HandshakeClient,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfer_loop import (
    REPEAT_SECONDS,
    TransferLoop,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    BlockArray,
    unpack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import WireError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Done,
    LeaseGranted,
    LeaseRequest,
    Packet,
    Register,
    decode_packet,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.role import NixlWorker


class Faults:
    """The plan in force. Every thread has an instance of its own."""

    def __init__(self) -> None:
        self._path = Path(os.environ[CONTROL_VARIABLE])
        self._changed: tuple[int, ...] = ()
        self._plan = Plan()
        self._applied: Counter[tuple[str, str]] = Counter()
        self._log = events_path(self._path).open("ab", buffering=0)

    @property
    def plan(self) -> Plan:
        """What is wrong at present."""
        stat = self._path.stat()
        # Every change makes a new file, and times are coarse.
        changed = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if changed != self._changed:
            self._plan = msgspec.json.decode(self._path.read_bytes(), type=Plan)
            self._changed = changed
        return self._plan

    def rule(self, on: Where, kind: str, transfer: str) -> tuple[str, Rule] | None:
        """The rule to apply now, which counts as applied."""
        for name, rule in self.plan.rules.items():
            if (
                rule.on == on
                and rule.kind in (ANY, kind)
                and transfer.startswith(rule.transfer)
                and (rule.count is None or self._applied[name, transfer] < rule.count)
            ):
                self._applied[name, transfer] += 1
                return name, rule
        return None

    def holds(self, name: str) -> bool:
        """Whether a rule is still in force."""
        return name in self.plan.rules

    def log(
        self, what: str, kind: str = "", transfer: str = "", fault: str = ""
    ) -> None:
        """Tell the tests."""
        if fault or self._plan.trace:
            event = Event(what, kind, transfer, fault)
            self._log.write(msgspec.json.encode(event) + b"\n")


@dataclass
class _Kept:
    """A notification that waits: for its time, or for its rule to be taken away."""

    peer: AgentName
    data: bytes
    rule: str | None
    due: float


@dataclass
class _Transfer:
    """A transfer that something is wrong with."""

    post: Callable[[], tuple[Any, TransferState]]
    kind: str
    transfer: str
    rule: str | None = None
    due: float = 0.0
    fails: bool = False
    handle: Any = None
    state: TransferState | None = None


class FaultyAgent(Agent):
    """An agent whose notifications and transfers go wrong as planned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._faults = Faults()
        self._outgoing: list[_Kept] = []
        self._incoming: list[_Kept] = []
        self._transfer_of: dict[str, str] = {}
        self._leased: dict[str, frozenset[int]] = {}

    def tell(self, request: ReceiveRequest) -> None:
        """What is to be read may be read before anything is said of it."""
        self._transfer_of[request.registration_id] = request.transfer_id
        if request.hint is not None:
            groups = request.hint.blocks
            blocks = frozenset(int(block) for group in groups for block in group)
            self._leased[request.registration_id] = blocks

    # ---- notifications

    def notify(self, peer: AgentName, message: bytes) -> None:
        kind, transfer = self._describe(message)
        if self._faults.plan.cut:
            self._faults.log("send", kind, transfer, "cut")
            return
        found = self._faults.rule("send", kind, transfer)
        if found is None:
            self._faults.log("send", kind, transfer)
            super().notify(peer, message)
            return
        name, rule = found
        self._faults.log("send", kind, transfer, rule.do)
        match rule.do:
            case "drop":
                pass
            case "repeat":
                super().notify(peer, message)
                super().notify(peer, message)
            case "delay":
                due = time.monotonic() + rule.seconds
                self._outgoing.append(_Kept(peer, message, None, due))
            case "hold":
                self._outgoing.append(_Kept(peer, message, name, 0.0))
            case _:
                raise AgentError(f"injected: {kind} cannot be sent")

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        self._flush()
        passed: list[tuple[AgentName, bytes]] = []
        for peer, data in super().notifications():
            passed += self._receive(peer, data)
        for kept in self._ripe(self._incoming):
            passed.append((kept.peer, kept.data))
        return passed

    def _receive(self, peer: AgentName, data: bytes) -> list[tuple[AgentName, bytes]]:
        kind, transfer = self._describe(data)
        if self._faults.plan.cut:
            self._faults.log("receive", kind, transfer, "cut")
            return []
        found = self._faults.rule("receive", kind, transfer)
        if found is None:
            self._faults.log("receive", kind, transfer)
            return [(peer, data)]
        name, rule = found
        self._faults.log("receive", kind, transfer, rule.do)
        match rule.do:
            case "repeat":
                return [(peer, data), (peer, data)]
            case "delay":
                due = time.monotonic() + rule.seconds
                self._incoming.append(_Kept(peer, data, None, due))
            case "hold":
                self._incoming.append(_Kept(peer, data, name, 0.0))
        return []

    def _flush(self) -> None:
        for kept in self._ripe(self._outgoing):
            try:
                super().notify(kept.peer, kept.data)
            except AgentError:
                self._faults.log("send", fault="late notification not sent")

    def _ripe(self, waiting: list[_Kept]) -> list[_Kept]:
        now = time.monotonic()
        ripe = [
            kept
            for kept in waiting
            if (kept.rule is None and now >= kept.due)
            or (kept.rule is not None and not self._faults.holds(kept.rule))
        ]
        for kept in ripe:
            waiting.remove(kept)
        return ripe

    # ---- transfers

    def post(
        self,
        operation: str,
        local: Any,
        local_indices: BlockArray,
        remote: Any,
        remote_indices: BlockArray,
        notification: bytes,
    ) -> tuple[Any, TransferState]:
        transfer = self._transfer(operation, remote_indices, notification)
        found = self._faults.rule("post", operation, transfer)
        cut = self._faults.plan.cut
        name, rule = found or ("", None)
        do = "cut" if cut else "" if rule is None else rule.do
        self._faults.log("post", operation, transfer, do)
        if do == "fail":
            raise AgentError(f"injected: {operation} cannot be posted")
        muted = b"" if do in ("mute", "fail_late") else notification
        right = super().post

        def post() -> tuple[Any, TransferState]:
            posted = right(
                operation, local, local_indices, remote, remote_indices, muted
            )
            self._faults.log("posted", operation, transfer)
            return posted

        if do in ("", "mute"):
            return post()
        late = _Transfer(post, operation, transfer)
        if do == "hold":
            late.rule = name
        elif do == "fail_late":
            late.fails = True
        elif rule is not None and not cut:
            late.due = time.monotonic() + rule.seconds
        return late, TransferState.RUNNING

    def check(self, handle: Any) -> TransferState:
        if not isinstance(handle, _Transfer):
            return super().check(handle)
        plan = self._faults.plan
        if handle.handle is None:
            if (
                plan.cut
                or time.monotonic() < handle.due
                or (handle.rule is not None and handle.rule in plan.rules)
            ):
                return TransferState.RUNNING
            handle.handle, handle.state = handle.post()
        if handle.state is TransferState.RUNNING:
            handle.state = super().check(handle.handle)
        assert handle.state is not None
        if handle.fails and handle.state is not TransferState.RUNNING:
            return TransferState.FAILED
        return handle.state

    def release(self, handle: Any) -> None:
        if not isinstance(handle, _Transfer):
            super().release(handle)
        elif handle.handle is not None:
            super().release(handle.handle)

    # ---- what a message is about

    def _describe(self, data: bytes) -> tuple[str, str]:
        """The kind and the hand-off of a notification, as far as they are known."""
        try:
            packet = decode_packet(data)
        except WireError:
            return "garbage", ""
        return self._learn(packet)

    def _learn(self, packet: Packet) -> tuple[str, str]:
        body = packet.body
        kind = str(type(body).__struct_config__.tag)
        registration = str(getattr(body, "registration_id", ""))
        if isinstance(body, Register | LeaseRequest):
            self._transfer_of[registration] = body.transfer_id
        elif isinstance(body, LeaseGranted):
            blocks = {
                int(block) for group in body.blocks for block in unpack_blocks(group)
            }
            self._leased[registration] = frozenset(blocks)
        transfer = str(getattr(body, "transfer_id", ""))
        return kind, transfer or self._transfer_of.get(registration, "")

    def _transfer(self, operation: str, remote: BlockArray, notification: bytes) -> str:
        """The hand-off that a transfer is for. A READ is known by what it reads."""
        if operation == "WRITE":
            body = decode_packet(notification).body
            assert isinstance(body, Done)
            return self._transfer_of.get(body.registration_id, "")
        # The first page of a list is one of region 0, whose index is its block's.
        first = int(remote[0])
        for registration, blocks in reversed(list(self._leased.items())):
            if first in blocks:
                return self._transfer_of.get(registration, "")
        return ""


class _CutHandshakes(HandshakeClient):
    """Handshakes that meet silence while the network is cut.

    One that is under way when the network is whole again goes on, as a connection does
    whose packets are sent anew.
    """

    def __init__(self, faults: Faults, timeout: float, token: Token | None) -> None:
        super().__init__(timeout, token)
        self._faults = faults
        self._seconds = timeout
        self._silent: dict[Address, float] = {}

    @property
    def pending(self) -> bool:
        return bool(self._silent) or super().pending

    def start(self, address: Address, now: float) -> None:
        if self._faults.plan.cut:
            self._silent.setdefault(address, now + self._seconds)
        elif address not in self._silent:
            super().start(address, now)

    def poll(self, now: float) -> list[Handshake]:
        cut = self._faults.plan.cut
        if not cut:
            for address in self._silent:
                super().start(address, now)
            self._silent.clear()
        ended = super().poll(now)
        if cut:
            ended = [Handshake(e.address, failure="injected: cut") for e in ended]
        for address, due in list(self._silent.items()):
            if now > due:
                del self._silent[address]
                ended.append(Handshake(address, failure="injected: cut"))
        return ended


class _CarelessReceiver(ReceiverTable):
    """Gives blocks back that a silent peer may still write to, if so planned."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(REPEAT_SECONDS)
        self._faults = faults

    def peer_lost(self, peer: AgentName, reason: str, now: float) -> list[Action]:
        if self._faults.plan.careless:
            return self.peer_gone(peer, reason, now)
        return super().peer_lost(peer, reason, now)


class FaultyWorker(NixlWorker):
    """A worker with a faulty agent, whose steps can be made longer."""

    agent_class = FaultyAgent

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._faults = Faults()

    def begin_step(self, metadata: NixlConnectorMetadata) -> None:
        for command in metadata.commands:
            if isinstance(command, Receive) and self._thread is not None:
                agent = self._thread.loop._agent
                assert isinstance(agent, FaultyAgent)
                agent.tell(command.request)
        super().begin_step(metadata)
        delay = self._faults.plan.step_delay
        self._faults.log("step")
        if delay:
            time.sleep(delay)

    def end_forward(self, metadata: NixlConnectorMetadata) -> None:
        for offer in metadata.offers:
            if not offer.missing_tokens:
                self._faults.log("offer", transfer=offer.transfer_id)
        super().end_forward(metadata)

    def _make_loop(
        self, layout: CacheLayout, publish: Callable[[Facts], None]
    ) -> TransferLoop:
        loop = super()._make_loop(layout, publish)
        faults = Faults()
        loop._receiver = _CarelessReceiver(faults)
        loop._connections._handshakes = _CutHandshakes(
            faults,
            self._config.handshake_timeout,
            Token.load(self._config.side_channel_token_file),
        )
        return loop


class FaultyPushConnector(NixlPushConnector):
    """Push over a transport that misbehaves."""

    worker_class = FaultyWorker


class FaultyPullConnector(NixlPullConnector):
    """Pull over a transport that misbehaves."""

    worker_class = FaultyWorker
