# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the distributed tests: engines, right answers, an HTTP client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from handoff_client import REQUEST_TIMEOUT_S, Client, assert_clean
from handoff_engines import EngineRoom, engines_lock, log_tails
from handoff_workload import (
    Ask,
    References,
    Tokens,
    all_asks,
    conversations,
    said,
)
from pd_launcher import Engine, Mode, Pair

_HERE = Path(__file__).resolve().parent
LOG_TAIL_LINES = 40
REFERENCES_AT_ONCE = 8

_rooms: list[EngineRoom] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which router ``test_router_contract.py`` tests instead of ours."""
    group = parser.getgroup("router contract")
    add = group.addoption
    add("--router-command", help="starts it; see PLACES in router_contract/bench.py")
    add("--router-url", help="where it listens, if it runs already")
    add("--router-mode", choices=["push", "pull"], help="who moves the KV")
    add("--router-ports", metavar="P,D,PS,DS", help="of the engines it is set to")
    add("--router-ready-path", help="answers 200 once it serves; /health if not given")
    add(
        "--router-conversations",
        action="store_true",
        help="it names the turn before to the prefill engine",
    )
    add(
        "--router-waive",
        action="append",
        metavar="CHECK",
        help="skip a check; repeatable",
    )


# In this order, the engines of a mode that most tests need are started once, and kept
# from the tests before and for those after them, as far as these need them.
_STAGES = (
    ("test_multi_connector", "push"),
    ("test_ranks", "push"),
    ("test_windows", "push"),
    ("test_executors", "push"),
    ("test_multimodal", "push"),
    ("test_conversations", "push"),
    ("test_data_parallel", "push"),
    ("test_corruption", "push"),
    ("", "push"),
    ("test_mismatch_mode", ""),
    ("", "pull"),
    ("test_corruption", "pull"),
    ("test_data_parallel", "pull"),
    ("test_conversations", "pull"),
    ("test_windows", "pull"),
    ("test_executors", "pull"),
    ("test_multimodal", "pull"),
    ("test_ranks", "pull"),
    ("test_block_sizes", "push"),
    ("test_block_sizes", "pull"),
    ("test_shutdown", "push"),
    ("test_shutdown", "pull"),
)


def _stage(item: pytest.Item) -> int:
    """Which engines a test needs, as a place in the order of starting them."""
    if not item.get_closest_marker("distributed"):
        return -2
    if item.path.parent != _HERE or not isinstance(item, pytest.Function):
        return -1
    params = item.callspec.params if hasattr(item, "callspec") else {}
    stage = (item.path.stem, params.get("mode", ""))
    known = stage if stage in _STAGES else ("", stage[1])
    # A module that runs engines of its own comes after these.
    return _STAGES.index(known) if known in _STAGES else len(_STAGES)


# Last, because pytest sorts by parameters of fixtures itself.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_stage)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and _rooms and item.get_closest_marker("distributed"):
        report.sections.extend(log_tails(_rooms[-1].servers(), LOG_TAIL_LINES))
    return report


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRoom]:
    """Starts and stops engines; nobody else on this machine does meanwhile."""
    made = EngineRoom(tmp_path_factory.mktemp("engine-logs"))
    with engines_lock():
        _rooms.append(made)
        try:
            yield made
        finally:
            _rooms.remove(made)
            made.close()


@pytest.fixture(scope="session")
def references(room: EngineRoom) -> References:
    """The single engine's answers to all that the tests ask."""
    engine = room.single()
    started = time.monotonic()
    made = References(asyncio.run(_ask_single(engine)))
    seconds = time.monotonic() - started
    print(f"\n{len(made.answers)} answers of a single engine in {seconds:.0f} s")
    return made


async def _ask_single(engine: Engine) -> dict[tuple[int, ...], tuple[int, ...]]:
    async with _session() as session:
        client = Client(session)
        found = await client.answers(engine, all_asks(), REFERENCES_AT_ONCE)
        answers = {ask.prompt: tokens for ask, tokens in found}
        talks = (_converse(client, engine, name) for name in conversations())
        for talk in await asyncio.gather(*talks):
            answers.update(talk)
    return answers


async def _converse(
    client: Client, engine: Engine, conversation: str
) -> dict[Tokens, Tokens]:
    answers: dict[Tokens, Tokens] = {}
    history: Tokens = ()
    for words_said in said(conversation):
        prompt = history + words_said
        answers[prompt] = await client.answer(engine, Ask(prompt))
        history = prompt + answers[prompt]
    return answers


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    # Engines close idle connections; a new one for each request meets no race.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=timeout, connector=connector)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with _session() as session:
        yield Client(session)


@pytest.fixture(params=["push", "pull"])
def mode(request: pytest.FixtureRequest) -> Mode:
    """Which side moves the KV."""
    chosen: Mode = request.param
    return chosen


@pytest_asyncio.fixture
async def pair(
    room: EngineRoom, references: References, mode: Mode, client: Client
) -> AsyncIterator[Pair]:
    """Two engines and a router, which hold nothing once the test has ended."""
    running = room.pair(mode, f"{mode}-prefill", f"{mode}-decode")
    yield running
    await assert_clean(client, running)
