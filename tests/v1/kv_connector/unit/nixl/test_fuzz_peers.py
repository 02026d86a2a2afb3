# SPDX-License-Identifier: Apache-2.0
"""A transfer loop on real agents, whose peers describe themselves as they like."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from v1.kv_connector.unit.nixl.arena import (
    CONFIG,
    PATIENCE_S,
    free_address,
    offer,
    request,
    run,
)
from v1.kv_connector.unit.nixl.fuzz_scene import BLOCKS, WANT, Scene, packet, scene
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Expect, Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    ReceiveFailed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    Mode,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.process import this_process
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import pack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    MAX_REASON_CHARS,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Goodbye,
    LeaseRequest,
    Ping,
    Register,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    Ranks,
    SideChannelError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    Report as Answer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    ProcessInfo,
    RegionInfo,
)

# ---- descriptions of a peer


def _regions(s: Scene, **changes: Any) -> tuple[RegionInfo, ...]:
    return tuple(
        msgspec.structs.replace(region, **changes) for region in s.stranger.info.regions
    )


def _first_region(s: Scene, **changes: Any) -> tuple[RegionInfo, ...]:
    first, *others = s.stranger.info.regions
    return (msgspec.structs.replace(first, **changes), *others)


DESCRIPTIONS: dict[str, Callable[[Scene], dict[str, Any]]] = {
    "no regions": lambda s: {"regions": ()},
    "no blocks": lambda s: {"regions": _regions(s, num_blocks=0)},
    "fewer than no blocks": lambda s: {"regions": _regions(s, num_blocks=-1)},
    "int32 blocks": lambda s: {"regions": _regions(s, num_blocks=2**31 - 1)},
    "int64 blocks": lambda s: {"regions": _regions(s, num_blocks=2**62)},
    "more blocks than it has": lambda s: {"regions": _regions(s, num_blocks=33)},
    "unequal": lambda s: {"regions": _first_region(s, num_blocks=3)},
    "address 0": lambda s: {"regions": _regions(s, address=0)},
    "a negative address": lambda s: {"regions": _regions(s, address=-5)},
    "the last address": lambda s: {"regions": _regions(s, address=2**64 - 1)},
    "stride 0": lambda s: {"regions": _regions(s, stride=0)},
    "a negative stride": lambda s: {"regions": _regions(s, stride=-256)},
    "a huge stride": lambda s: {"regions": _regions(s, stride=2**63)},
    "smaller pages": lambda s: {"regions": _regions(s, page_bytes=1)},
    "a device": lambda s: {"regions": _regions(s, device_id=2**40)},
    "device -1": lambda s: {"regions": _regions(s, device_id=-1)},
    "another group": lambda s: {"regions": _regions(s, group=1)},
    "group -1": lambda s: {"regions": _regions(s, group=-1)},
    "one layer": lambda s: {"regions": _regions(s, layer="layer0")},
    "many layers": lambda s: {"regions": _regions(s) * 1000},
    "other memory": lambda s: {"mem_type": "VRAM"},
    "no memory type": lambda s: {"mem_type": "x" * 1000},
    "block size 0": lambda s: {"block_size": 0},
    "tp 0": lambda s: {"tp_size": 0},
    "tp -1": lambda s: {"tp_size": -1, "tp_rank": -1},
    "another protocol": lambda s: {"protocol": 99},
    "the victim's name": lambda s: {"agent_name": s.victim.name},
    "another's name": lambda s: {"agent_name": s.honest.name},
    "the victim's engine": lambda s: {"engine_id": s.victim.info.engine_id},
    "another's engine": lambda s: {"engine_id": s.honest.info.engine_id},
    "a long engine id": lambda s: {"engine_id": "x" * 10_000},
    "facts of two lines": lambda s: {"layout": {"a\nb": "c\rd"}, "compat": {"\0": ""}},
    "an engine id of two lines": lambda s: {"engine_id": "a\nERROR b"},
    "other facts": lambda s: {"layout": {f"k{i}": "v" * 100 for i in range(1000)}},
    "no metadata": lambda s: {"agent_metadata": b""},
    "spoilt metadata": lambda s: {"agent_metadata": bytes(300)},
    "cut metadata": lambda s: {
        "agent_metadata": s.stranger.info.agent_metadata[:-9],
    },
    "the victim's metadata": lambda s: {"agent_metadata": s.victim.agent.metadata()},
    "another's metadata": lambda s: {"agent_metadata": s.honest.agent.metadata()},
    "an unreadable name": lambda s: {
        "agent_metadata": s.stranger.info.agent_metadata.replace(b"stran", b"\xff" * 5),
    },
    "a dead process": lambda s: {
        "process": ProcessInfo(this_process().boot_id, 2**22 + 1, 5),
    },
    "an odd process": lambda s: {"process": ProcessInfo(this_process().boot_id, -1, 0)},
    "the largest": lambda s: {"compat": {"k": "v" * (4 << 20)}},
}


@pytest.mark.parametrize("mode", Mode)
def test_any_description_of_a_peer(mode: Mode) -> None:
    with scene(mode) as s:
        for number, (name, change) in enumerate(DESCRIPTIONS.items()):
            stranger = s.stranger
            hello = stranger.hello(**change(s))
            wanted = TransferId(f"wanted-{number}")
            s.victim.step(Expect(wanted, 2, ()), offer(wanted, BLOCKS + 20))
            ids = RegistrationId(f"a{number}"), RegistrationId(f"b{number}")
            s.tell(
                [
                    packet(Ping(), hello),
                    packet(LeaseRequest(wanted, ids[0], WANT), hello),
                    packet(
                        Register(wanted, ids[1], WANT, (pack_blocks(BLOCKS),)), hello
                    ),
                ]
            )
            try:
                s.work()
            except AssertionError as error:
                raise AssertionError(f"after {name!r}: {error}") from error
            s.tell([packet(Goodbye(), hello)])
            stranger.close()
            s.strangers.remove(stranger)
            s.stranger = s.another()
        s.check()


def test_a_peer_that_describes_itself_well_is_served() -> None:
    """So that what the others are refused is not refused to all."""
    with scene(Mode.PUSH) as s:
        hello = s.stranger.hello()
        wanted = TransferId("wanted")
        s.victim.pages[:, BLOCKS + 20] = 9
        s.victim.step(Expect(wanted, 1, ()), offer(wanted, BLOCKS + 20))
        register = Register(
            wanted, RegistrationId("good"), WANT, (pack_blocks(BLOCKS),)
        )
        s.tell([packet(register, hello)])
        run(s.ranks, lambda: not s.tables()["sender_handoffs"], s.strangers)
        assert (s.stranger.pages[:, BLOCKS] == 9).all()


# ---- engines that a request names


@contextmanager
def answering(frames: list[bytes] | None) -> Iterator[Address]:
    """A side channel that answers everything with these frames, or nothing."""
    address = free_address()
    stop = threading.Event()
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.bind(f"tcp://{address[0]}:{address[1]}")

    def serve() -> None:
        with sock:
            while not stop.is_set():
                if sock.poll(20):
                    route, *_ = sock.recv_multipart()
                    if frames is not None:
                        sock.send_multipart([route, *frames])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        stop.set()
        thread.join(PATIENCE_S)


ANSWERS: dict[str, list[bytes] | None] = {
    "nothing": None,
    "an empty frame": [b""],
    "garbage": [b"", b"\xff" * 100],
    "many frames": [b""] * 1000,
    "too much": [b"", bytes((16 << 20) + 1)],
    "another answer": [b"", encode(Answer(b"{}"))],
    "a long excuse": [b"", encode(SideChannelError("no\n" * 1_000_000))],
    "no ranks": [b"", encode(Ranks(()))],
    "ranks that are none": [b"", encode(Ranks((b"", b"x")))],
    "many ranks": [b"", encode(Ranks((b"",) * 4097))],
    "a deep answer": [b"", b"\x91" * (1 << 20)],
}


@pytest.mark.parametrize("name", ANSWERS)
def test_any_answer_of_an_engine_that_a_request_names(name: str) -> None:
    with scene(Mode.PUSH) as s, answering(ANSWERS[name]) as address:
        wanted = request(TransferId("t"), BLOCKS, Mode.PUSH)
        s.victim.step(Receive(wanted, address))
        before = time.monotonic()
        run(s.ranks, lambda: isinstance(s.victim.events[-1], ReceiveFailed))
        assert time.monotonic() - before < CONFIG.handshake_timeout + PATIENCE_S / 2
        failed = s.victim.events[-1]
        assert isinstance(failed, ReceiveFailed)
        assert failed.registration_id == wanted.registration_id
        assert failed.quiet
        assert 0 < len(failed.reason) < MAX_REASON_CHARS + 200
        s.check()


def test_an_engine_that_describes_another_as_its_own() -> None:
    with scene(Mode.PUSH) as s:
        spoilt = msgspec.structs.replace(
            s.stranger.info, agent_metadata=s.honest.agent.metadata()
        )
        unreadable = msgspec.structs.replace(
            s.stranger.info,
            agent_metadata=s.stranger.info.agent_metadata.replace(
                b"stran", b"\xff" * 5
            ),
        )
        for info in (spoilt, unreadable):
            with answering([b"", encode(Ranks((encode(info),)))]) as address:
                s.victim.step(
                    Receive(request(TransferId("t"), BLOCKS, Mode.PUSH), address)
                )
                run(s.ranks, lambda: isinstance(s.victim.events[-1], ReceiveFailed))
            s.check()
