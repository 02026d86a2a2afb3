# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker by itself, under random histories, and in a router."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from pd_router.breaker import (
    MAX_BACKOFF,
    Breaker,
    BreakerSettings,
    BreakerState,
    Permit,
)
from pd_router.routing import RoutingSettings
from router_backends import (
    DONE,
    ERROR,
    Cluster,
    Script,
    Seen,
    answers,
    in_turn,
    prefill_answer,
    streams,
    token,
)

SECONDS = 4.0


class Clock:
    """A time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock, failures: int = 3) -> Breaker:
    breaker = Breaker(BreakerSettings(failures, SECONDS), clock)
    for _ in range(failures):
        breaker.begin().failure()
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(BreakerSettings(3, SECONDS), Clock())
    for _ in range(4):
        breaker.begin().failure()
        breaker.begin().failure()
        breaker.begin().success()
    assert breaker.state is BreakerState.CLOSED
    breaker.begin().failure()
    breaker.begin().failure()
    last = breaker.begin()
    assert last.failure()
    assert not last.failure()
    assert not breaker.admits
    with pytest.raises(RuntimeError, match="open admits no leg"):
        breaker.begin()


def test_half_open_sends_one_probe() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert breaker.retry_in == SECONDS
    clock.now += SECONDS
    assert breaker.state is BreakerState.HALF_OPEN
    probe = breaker.begin()
    assert not breaker.admits
    # A client that leaves tells nothing; somebody else's request is the next probe.
    probe.end()
    assert breaker.begin().success()
    assert str(breaker.state) == "closed"
    assert [breaker.begin() for _ in range(9)]


def test_failed_probes_double_the_time_up_to_a_limit() -> None:
    clock = Clock()
    breaker = opened(clock)
    waits = []
    for _ in range(5):
        clock.now += breaker.retry_in
        assert breaker.begin().failure()
        waits.append(breaker.retry_in / SECONDS)
    assert waits == [2, 4, 8, 8, 8]
    assert waits[-1] == MAX_BACKOFF
    clock.now += breaker.retry_in
    assert breaker.begin().success()
    for _ in range(3):
        breaker.begin().failure()
    assert breaker.retry_in == SECONDS


def test_legs_that_began_before_it_opened_count_for_nothing() -> None:
    clock = Clock()
    breaker = Breaker(BreakerSettings(2, SECONDS), clock)
    early = [breaker.begin() for _ in range(6)]
    assert [permit.failure() for permit in early[:4]] == [False, True, False, False]
    assert (breaker.opened, breaker.retry_in) == (1, SECONDS)
    assert not early[4].success()
    assert breaker.state is BreakerState.OPEN


def test_none_is_never_open() -> None:
    breaker = Breaker(BreakerSettings(0, SECONDS), Clock())
    for _ in range(100):
        breaker.begin().failure()
    assert breaker.state is BreakerState.CLOSED


class History(RuleBasedStateMachine):
    """Against a model that keeps the whole history instead of counters."""

    permits = Bundle("permits")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(BreakerSettings(3, SECONDS), self.clock)
        self.row = 0
        self.wait = SECONDS
        self.open_until: float | None = None
        self.current: set[Permit] = set()
        self.succeeded: set[Permit] = set()
        self.probe: Permit | None = None

    def expected(self) -> BreakerState:
        if self.open_until is None:
            return BreakerState.CLOSED
        if self.clock.now < self.open_until:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    @precondition(lambda self: self.breaker.admits)
    @rule(target=permits)
    def begin(self) -> Permit:
        permit = self.breaker.begin()
        if self.open_until is None:
            self.current.add(permit)
        else:
            assert self.probe is None
            self.probe = permit
        return permit

    @rule(permit=permits)
    def success(self, permit: Permit) -> None:
        closes = permit.success()
        assert closes == (permit is self.probe)
        if closes:
            self.probe = self.open_until = None
            self.wait = SECONDS
        if closes or permit in self.current - self.succeeded:
            self.row = 0
        self.succeeded.add(permit)

    @rule(permit=consumes(permits))
    def failure(self, permit: Permit) -> None:
        opens = permit.failure()
        if permit is self.probe:
            assert opens
            self.wait = min(2 * self.wait, MAX_BACKOFF * SECONDS)
            self._open()
        elif permit in self.current:
            self.row += 1
            assert opens == (self.row == 3)
            if opens:
                self._open()
        else:
            assert not opens

    def _open(self) -> None:
        self.open_until = self.clock.now + self.wait
        self.current.clear()
        self.probe = None

    @rule(permit=consumes(permits))
    def end(self, permit: Permit) -> None:
        permit.end()
        self.current.discard(permit)
        if permit is self.probe:
            self.probe = None

    @rule(seconds=st.sampled_from([0.5, SECONDS, 20 * SECONDS]))
    def later(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def worker_came_back(self) -> None:
        self.breaker.try_now()
        if self.open_until is not None:
            self.open_until = min(self.open_until, self.clock.now)

    @invariant()
    def agrees(self) -> None:
        assert self.breaker.state is self.expected()
        may = self.open_until is None or (
            self.expected() is BreakerState.HALF_OPEN and self.probe is None
        )
        assert self.breaker.admits == may


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


PROMPT = {"prompt": "p", "stream": True}


def later(seconds: float, script: Script) -> Script:
    """As a decode engine that waits for KV."""

    async def slow(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await script(seen)

    return slow


OK_DECODE = later(0.1, streams(token("a"), DONE))
BROKEN = answers({"error": {"message": "x"}}, status=500)


def tripping(failures: int = 2, seconds: float = 60.0) -> RoutingSettings:
    return RoutingSettings(breaker=BreakerSettings(failures, seconds))


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_a_broken_prefill_is_left_out_and_tried_again(
    cluster: Cluster, mode: str
) -> None:
    works = answers(prefill_answer())
    await cluster.start(
        mode, [in_turn(BROKEN, BROKEN, works), works], OK_DECODE, routing=tripping()
    )
    got = [(await cluster.post(PROMPT)).status for _ in range(8)]
    assert got.count(503) == 2
    first = cluster.prefill[0]
    assert len(first.seen) == 2
    name = f"prefill {first.address}"
    assert (await cluster.get("/health")).json["breakers"] == {name: "open"}
    assert await cluster.metric(
        "pd_router_worker_breaker", worker=str(first.address), state="open"
    )
    assert (
        await cluster.metric(
            "pd_router_worker_breaker_opened_total", worker=str(first.address)
        )
        == 1
    )
    (worker,) = (w for w in cluster.router.workers if w.address == first.address)
    worker.breaker.try_now()
    assert (await cluster.get("/health")).json["breakers"] == {name: "half_open"}
    for _ in range(2):
        assert (await cluster.post(PROMPT)).status == 200
    assert len(first.seen) == 3
    assert (await cluster.get("/health")).json == {"status": "ok", "breakers": {}}


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_all_open_is_a_503_that_says_so(cluster: Cluster, mode: str) -> None:
    await cluster.start(mode, BROKEN, OK_DECODE, routing=tripping())
    causes = []
    for _ in range(3):
        got = await cluster.post(PROMPT)
        assert got.status == 503
        causes.append(got.error["cause"])
    assert causes == ["prefill_status", "prefill_status", "circuit_open"]
    assert "every healthy prefill worker (1) has failed" in got.error["message"]
    assert 1 <= int(got.headers["Retry-After"]) <= 60
    assert len(cluster.prefill[0].seen) == 2
    assert (await cluster.get("/ready")).status == 503


@pytest.mark.parametrize(
    "decode",
    [
        answers({"error": {"message": "too long", "code": 400}}, status=400),
        answers({"error": {"message": "busy"}}, status=429),
    ],
)
async def test_refusals_do_not_count(cluster: Cluster, decode: Script) -> None:
    await cluster.start("pull", answers(prefill_answer()), decode, routing=tripping())
    for _ in range(4):
        assert 400 <= (await cluster.post(PROMPT)).status < 500
    assert (await cluster.get("/health")).json["breakers"] == {}


async def test_clients_that_leave_do_not_count(cluster: Cluster) -> None:
    await cluster.start(
        "push", answers(), streams(token("a"), end="hang"), routing=tripping(1)
    )
    for number in range(3):
        asking = asyncio.create_task(cluster.post(PROMPT))
        await cluster.decode[0].request(number)
        await asyncio.sleep(0.05)
        asking.cancel()
        await cluster.quiet()
    assert (await cluster.get("/health")).json["breakers"] == {}


async def test_the_side_that_always_fails_opens_first(cluster: Cluster) -> None:
    # A decode engine that gets no KV fails like one that is broken itself.
    async def decode(seen: Seen) -> web.StreamResponse:
        fails = seen.params["remote_port"] == 5600
        return await (streams(ERROR, DONE) if fails else OK_DECODE)(seen)

    await cluster.start(
        "push", [answers(), answers()], [decode] * 3, routing=tripping(3), retries=0
    )
    for _ in range(12):
        await cluster.post(PROMPT)
    broken = (await cluster.get("/health")).json["breakers"]
    assert broken == {f"prefill {cluster.prefill[0].address}": "open"}


async def test_a_stream_that_breaks_off_counts(cluster: Cluster) -> None:
    await cluster.start("push", answers(), streams(token("a"), end="abort"))
    await cluster.post(PROMPT)
    shown = (await cluster.get("/status")).json["workers"]
    assert [worker["breaker"]["failures"] for worker in shown] == [0, 1]
