# SPDX-License-Identifier: Apache-2.0
"""Faults that leave both engines alive: of single messages, transfers, handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from fault_engines import HANDSHAKE_TIMEOUT_S, Side
from fault_requests import HandOff, Outcome, Verdict, stage_ask, wrong
from fault_rules import Rule
from fault_scenarios import (
    BOUND_S,
    SLACK_S,
    World,
    aftermath,
    ended,
    healthy_traffic,
    unfit,
)
from handoff_client import side_channel_address
from pd_launcher import Mode
from pd_processes import LOOPBACK, free_ports
from v1.kv_connector.unit.nixl.arena import NoReports
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Agent
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.process import this_process
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
    SideChannelServer,
    query,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import pack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Hello,
    LeaseRequest,
    Packet,
    Refused,
    Register,
    Want,
    decode_packet,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetRanks,
    Ranks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    RankInfo,
    decode_rank,
)

HANDSHAKES: dict[Side, tuple[str, ...]] = {
    "P": ("wrong_mode", "wrong_token", "nobody"),
    "D": ("wrong_mode",),
}
DELAY_S = 0.7
EARLY_S = 1.5
SLOW_TRANSFER_S = 3.0


@dataclass(frozen=True)
class _Case:
    """One hand-off with a fault of its own.

    Attributes:
        rules: what goes wrong on each side.
        may_fail: whether the KV may not come.
        mismatch: the prefill leg has another prompt.
        hangs_up: the decode leg, sent alone, is aborted.
        early: the decode leg is sent first, so that P has to promise the KV.
    """

    rules: dict[Side, tuple[Rule, ...]] = field(default_factory=dict)
    may_fail: bool = False
    mismatch: bool = False
    hangs_up: bool = False
    early: bool = False


def _lost(side: Side, kind: str) -> _Case:
    return _Case({side: (Rule("send", "drop", kind, count=1),)})


def _everything(side: Side, rule: Rule) -> _Case:
    return _Case({side: (rule,)})


_REPEATED = Rule("send", "repeat")
_DELAYED = Rule("send", "delay", seconds=DELAY_S)

MESSAGES: dict[tuple[Mode, Side], dict[str, _Case]] = {
    ("push", "D"): {
        "lost_register": _lost("D", "register"),
        "lost_cancel": _Case(
            {"D": (Rule("send", "drop", "cancel", count=1),)}, hangs_up=True
        ),
        "repeated": _everything("D", _REPEATED),
        "delayed": _everything("D", _DELAYED),
    },
    ("push", "P"): {
        "lost_accepted": _Case(
            {"P": (Rule("send", "drop", "accepted", count=1),)}, early=True
        ),
        "lost_done": _Case({"P": (Rule("post", "mute", "WRITE"),)}),
        "lost_done_and_finished": _Case(
            {
                "P": (
                    Rule("post", "mute", "WRITE"),
                    Rule("send", "drop", "finished", count=1),
                )
            }
        ),
        "lost_refused": _Case(
            {"P": (Rule("send", "drop", "refused", count=1),)},
            may_fail=True,
            mismatch=True,
        ),
        "lost_cancelled": _Case(
            {"P": (Rule("send", "drop", "cancelled", count=1),)}, hangs_up=True
        ),
        "repeated": _Case({"P": (_REPEATED,)}, early=True),
        "delayed": _Case({"P": (_DELAYED,)}, early=True),
    },
    ("pull", "D"): {
        "lost_lease_request": _lost("D", "lease_request"),
        "lost_read_done": _lost("D", "read_done"),
        "repeated": _everything("D", _REPEATED),
        "delayed": _everything("D", _DELAYED),
    },
    ("pull", "P"): {
        "lost_lease_granted": _lost("P", "lease_granted"),
        "lost_read_confirmed": _lost("P", "read_confirmed"),
        "lost_refused": _Case(
            {"P": (Rule("send", "drop", "refused", count=1),)},
            may_fail=True,
            mismatch=True,
        ),
        "repeated": _everything("P", _REPEATED),
        "delayed": _everything("P", _DELAYED),
    },
}

_MOVER: dict[Mode, tuple[Side, str]] = {"push": ("P", "WRITE"), "pull": ("D", "READ")}


def transfer_cases(mode: Mode) -> dict[str, _Case]:
    """Transfers that go wrong, on the side that moves the bytes."""
    side, kind = _MOVER[mode]
    return {
        "failed_post": _Case({side: (Rule("post", "fail", kind),)}, may_fail=True),
        "failed_completion": _Case(
            {side: (Rule("post", "fail_late", kind),)}, may_fail=True
        ),
        "slow": _Case({side: (Rule("post", "delay", kind, seconds=SLOW_TRANSFER_S),)}),
    }


async def messages(world: World, victim: Side) -> Verdict:
    """Notifications that the victim sends are lost, come twice, or come late."""
    return await _cases(world, MESSAGES[world.pair.mode, victim])


async def transfers(world: World) -> Verdict:
    """Transfers fail when they are posted, or at their end, or take long."""
    return await _cases(world, transfer_cases(world.pair.mode))


async def _cases(world: World, cases: dict[str, _Case]) -> Verdict:
    verdict = Verdict(problems={name: [] for name in cases})
    pair = world.pair
    for side in ("P", "D"):
        rules = {
            f"{name}{i}": msgspec.structs.replace(rule, transfer=f"{name}.")
            for name, case in cases.items()
            for i, rule in enumerate(case.rules.get(side, ()))
        }
        pair.control(side).change(rules=rules)
    marks = {side: pair.control(side).mark() for side in pair.engine_ids}
    traffic = healthy_traffic(world)
    await asyncio.gather(
        *(_case(world, verdict, name, case) for name, case in cases.items())
    )
    for name, case in cases.items():
        for side in case.rules:
            seen = [
                event
                for event in pair.control(side).events(marks[side])
                if event.fault and event.transfer.startswith(f"{name}.")
            ]
            if not seen:
                verdict.add(name, f"the fault did not happen on {side}")
    verdict.add_common(*await traffic.end())
    await aftermath(world, verdict)
    return verdict


async def _case(world: World, verdict: Verdict, name: str, case: _Case) -> None:
    hand_off = HandOff(world.requests, world.pair, name, stage_ask(name))
    started = time.monotonic()
    if case.hangs_up:
        hand_off.send_decode()
        assert hand_off.decode is not None
        await asyncio.sleep(1.0)
        hand_off.decode.cancel()
        await hand_off.decode
        return
    outcome = await ended(
        asyncio.create_task(_run(world, hand_off, case)),
        time.monotonic() + BOUND_S + SLACK_S,
    )
    if outcome is None:
        verdict.add(name, "the request hangs")
        return
    verdict.notes.append(f"{name}: {outcome} in {time.monotonic() - started:.1f} s")
    verdict.add(name, wrong(world.references, hand_off.ask, outcome))
    must = not (case.may_fail and world.may_fail)
    verdict.add(name, unfit(outcome, dead=False, must=must))
    if case.may_fail and world.may_fail and outcome.status == 200:
        verdict.add(name, "the hand-off cannot have worked, and yet there is an answer")


async def _run(world: World, hand_off: HandOff, case: _Case) -> Outcome:
    if case.early:
        hand_off.send_decode()
        assert hand_off.decode is not None
        await asyncio.sleep(EARLY_S)
        hand_off.send_prefill()
        return await hand_off.decode
    if not case.mismatch:
        return await hand_off.run()
    hand_off.send_prefill(stage_ask("registered").prompt)
    await hand_off.prefilled()
    hand_off.send_decode()
    assert hand_off.decode is not None
    return await hand_off.decode


# ---- handshakes


async def refuse(world: World, victim: Side) -> Verdict:
    """The victim, or whoever plays it, does not let the other in."""
    names = (
        ("wrong_mode", "wrong_token", "nobody") if victim == "P" else ("wrong_mode",)
    )
    verdict = Verdict(problems={name: [] for name in names})
    traffic = healthy_traffic(world)
    if victim == "P":
        await _refused_by_prefill(world, verdict)
    else:
        await asyncio.to_thread(_refused_by_engine, world, verdict)
    verdict.add_common(*await traffic.end())
    await aftermath(world, verdict)
    return verdict


async def _refused_by_prefill(world: World, verdict: Verdict) -> None:
    info = await asyncio.to_thread(_description, world)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(_foreign_agent(info))
        addresses = {
            "wrong_mode": stack.enter_context(_side_channel(encode(other[1]), None)),
            "wrong_token": stack.enter_context(
                _side_channel(encode(info), Token(secrets.token_bytes(32)))
            ),
            "nobody": (LOOPBACK, free_ports(1)[0]),
        }
        hand_offs: dict[str, HandOff] = {}
        for name, address in addresses.items():
            made = HandOff(world.requests, world.pair, name, stage_ask(name))
            made.send_decode(address)
            hand_offs[name] = made
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S + SLACK_S
        for name, hand_off in hand_offs.items():
            assert hand_off.decode is not None
            outcome = await ended(hand_off.decode, deadline)
            if outcome is None:
                verdict.add(name, "the request hangs")
                continue
            verdict.notes.append(f"{name}: {outcome}")
            verdict.add(name, wrong(world.references, hand_off.ask, outcome))
            verdict.add(name, unfit(outcome, dead=False, must=not world.may_fail))
            if world.may_fail and outcome.status == 200:
                verdict.add(name, "an answer, though there was nobody to hand off")


def _refused_by_engine(world: World, verdict: Verdict) -> None:
    """An agent of another mode asks the prefill engine, and must be told so."""
    info = _description(world)
    with _foreign_agent(info) as (agent, own):
        agent.add_peer(info.agent_metadata)
        registration = RegistrationId(secrets.token_hex(8))
        transfer = TransferId(secrets.token_hex(8))
        want = Want(32, 0, 32, b"")
        body = (
            Register(transfer, registration, want, (pack_blocks([1]),))
            if world.pair.mode == "push"
            else LeaseRequest(transfer, registration, want)
        )
        packet = Packet(PROTOCOL_VERSION, Hello(encode(own), b""), body)
        agent.notify(info.agent_name, encode(packet))
        deadline = time.monotonic() + SLACK_S
        while time.monotonic() < deadline:
            for _, data in agent.notifications():
                answer = decode_packet(data).body
                if isinstance(answer, Refused):
                    verdict.notes.append(f"wrong_mode: refused, {answer.reason}")
                    if "connector_mode" not in answer.reason:
                        verdict.add("wrong_mode", f"refused as {answer.reason!r}")
                    return
            time.sleep(0.01)
    verdict.add("wrong_mode", f"no refusal within {SLACK_S:g} s")


def _description(world: World) -> RankInfo:
    address = side_channel_address(world.pair.prefill)
    reply = query(address, GetRanks(), SLACK_S)
    assert isinstance(reply, Ranks)
    return decode_rank(reply.ranks[0])


@contextlib.contextmanager
def _foreign_agent(info: RankInfo) -> Iterator[tuple[Agent, RankInfo]]:
    """An agent of this process that says it were of the other mode."""
    name = AgentName(f"foreign:0:{secrets.token_hex(8)}")
    agent = Agent(name, ["UCX"], num_threads=0, progress_thread=False)
    other = "pull" if info.layout["connector_mode"] == "push" else "push"
    own = msgspec.structs.replace(
        info,
        engine_id="foreign",
        agent_name=name,
        agent_metadata=agent.metadata(),
        layout={**info.layout, "connector_mode": other},
        process=this_process(),
    )
    try:
        yield agent, own
    finally:
        agent.close()


@contextlib.contextmanager
def _side_channel(rank: bytes, token: Token | None) -> Iterator[Address]:
    address = (LOOPBACK, free_ports(1)[0])
    server = SideChannelServer(address, [rank], NoReports(), token)
    try:
        yield address
    finally:
        server.close()
