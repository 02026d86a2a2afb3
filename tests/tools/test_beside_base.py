# SPDX-License-Identifier: Apache-2.0
"""Engines with the base's connector and with ours, which meet in a rolling upgrade.

The base's part is its own code, out of the pinned wheel, in a process of its own.
"""

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from fork_build.fetch import cache_directory, fetch_wheel, pip_command
from fork_build.pins import REPOSITORY, load_pins
from fork_build.target import choose_target, choose_wheel
from v1.kv_connector.unit.nixl.arena import Rank, free_address, hand_off, request, run
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    FailureKind,
    ReceiveFailed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
    endpoint,
)

pytestmark = pytest.mark.timeout(180)

PACKAGE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
METADATA = b"what a worker of the base says of itself"
START_S, PATIENCE_S = 60.0, 5.0

# The thread by which an engine of the base answers handshakes, run as a program.
LISTENER = """
import importlib, importlib.util, json, sys, threading
name, folder, port, answer = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    name, folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules[name] = importlib.util.module_from_spec(spec)
question = importlib.import_module(name + ".metadata").GET_META_MSG
scheduler = importlib.import_module(name + ".base_scheduler")
(kind,) = (
    found
    for found in vars(scheduler).values()
    if "_nixl_handshake_listener" in getattr(found, "__dict__", {})
)
ready, stop = threading.Event(), threading.Event()
arguments = {(0, 0): answer.encode()}, ready, stop, "127.0.0.1", int(port)
listener = threading.Thread(target=kind._nixl_handshake_listener, args=arguments)
listener.start()
ready.wait()
print(json.dumps({"question": question.decode()}), flush=True)
listener.join()
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base's package, which ours has taken the place of."""
    pins = load_pins(REPOSITORY)
    target = choose_target(pins, os.environ)
    wheel = fetch_wheel(
        target,
        pins.version,
        choose_wheel(target),
        cache_directory(os.environ),
        pip_command(),
    )
    folder = tmp_path_factory.mktemp("base")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(PACKAGE + "/")]
        archive.extractall(folder, names)
    return folder / PACKAGE


class BaseEngine:
    """The base's listener, and what a decode engine of the base asks it."""

    def __init__(self, package: Path) -> None:
        self.address = free_address()
        name = PACKAGE.replace("/", ".")
        port, answer = str(self.address[1]), METADATA.decode()
        self._process = subprocess.Popen(
            [sys.executable, "-c", LISTENER, name, str(package), port, answer],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        watchdog = threading.Timer(START_S, self._process.kill)
        watchdog.start()
        told = self._first_line()
        watchdog.cancel()
        question = json.loads(told)["question"].encode()
        self.question = msgspec.msgpack.encode((question, 0, 0))

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return line
        assert self._process.stderr is not None
        raise AssertionError(self._process.stderr.read()[-2000:])

    def ends(self) -> bool:
        """Whether its thread ends within some seconds."""
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _ask(address: Address, question: bytes) -> list[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(endpoint(address))
        asker.send(question)
        return asker.recv_multipart() if asker.poll(int(PATIENCE_S * 1000)) else []


@pytest.fixture(scope="module")
def other(base: Path) -> Iterator[BaseEngine]:
    engine = BaseEngine(base)
    yield engine
    engine.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank("ours", Mode.PULL)
    yield rank
    rank.close()


def test_the_base_refuses_ours_and_takes_no_harm(other: BaseEngine, rank: Rank) -> None:
    wanted = request(TransferId("t"), np.arange(3, dtype=np.int32), Mode.PULL)
    rank.step(Receive(wanted, other.address))
    run([rank], lambda: bool(rank.events))
    (failed,) = rank.events
    assert isinstance(failed, ReceiveFailed)
    # Nothing was exposed, so the request can be computed here at once.
    assert (failed.kind, failed.quiet) == (FailureKind.UNREACHABLE, True)
    assert "no engine with this fork's connector" in failed.reason
    assert not any(rank.tables.values())
    # Other engines of the base still make its acquaintance.
    assert _ask(other.address, other.question)[0] == METADATA


def test_ours_refuses_the_base_and_takes_no_harm(other: BaseEngine, rank: Rank) -> None:
    (answer,) = _ask(rank.address, other.question)
    # The base wants two frames, and fails the request where there are not.
    assert b"the other engine has the base's connector" in answer
    sink = Rank("another of ours", Mode.PULL)
    hand_off(rank, sink, "beside it")
    sink.close()


def test_what_the_base_is_spared(base: Path) -> None:
    """Any other question ends its thread; this is why ours is what it is."""
    engine = BaseEngine(base)
    assert _ask(engine.address, engine.question)[0] == METADATA
    assert _ask(engine.address, msgspec.msgpack.encode(["get_ranks", 3])) == []
    assert engine.ends()
    engine.close()
