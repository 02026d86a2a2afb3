# SPDX-License-Identifier: Apache-2.0
"""What a router owes when a client leaves or an engine fails."""

from __future__ import annotations

import asyncio

import aiohttp

from router_contract.bench import ENDED_TIMEOUT_S, PROMPT, Bench, Got
from router_contract.engines import COMPLETIONS, MODEL, Leg, answer_text
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode


async def _ended(leg: Leg, role: str, why: str) -> None:
    try:
        await asyncio.wait_for(leg.ended.wait(), ENDED_TIMEOUT_S)
    except TimeoutError:
        raise AssertionError(
            f"the {role} leg goes on {ENDED_TIMEOUT_S:g} s after {why}"
        ) from None
    assert leg.outcome == "gone", f"the {role} leg has ended as {leg.outcome!r}"


def _is_failure(got: Got) -> None:
    """Nothing that could be taken for an answer."""
    assert got.status >= 500 or got.error, f"a failed hand-off is answered {got}"


async def clients_that_leave_end_the_legs(bench: Bench) -> None:
    """While P computes: in push both legs; in pull D is not asked any more."""
    hold = bench.prefill.behaviour.hold = asyncio.Event()
    asked = asyncio.create_task(bench.post())
    try:
        first = await bench.prefill.leg()
        second = await bench.decode.leg() if bench.mode is Mode.PUSH else None
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await _ended(first, "prefill", "the client has gone")
        if second is not None:
            await _ended(second, "decode", "the client has gone")
    finally:
        hold.set()
    await asyncio.sleep(0.2)
    asked_d = len(bench.decode.legs)
    assert asked_d == (bench.mode is Mode.PUSH), f"{asked_d} decode legs in all"


async def clients_that_leave_a_stream_end_it(bench: Bench) -> None:
    pause = bench.decode.behaviour.pause = asyncio.Event()
    try:
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        async with bench.session.post(bench.url + COMPLETIONS, json=body) as response:
            assert response.status == 200, response.status
            async with asyncio.timeout(10.0):
                await response.content.readany()
            response.close()
        # An engine notices when it writes, at the latest.
        leg = await bench.decode.leg()
        await _ended(leg, "decode", "the client has gone")
    finally:
        pause.set()


async def failed_prefill_is_no_answer(bench: Bench) -> None:
    """By status and by a broken connection, whole and streamed."""
    for stream in (False, True):
        for fault in ("status", "break_off"):
            behaviour = bench.prefill.behaviour
            behaviour.status = 500 if fault == "status" else None
            behaviour.break_off = fault == "break_off"
            got = await bench.post({"stream": stream})
            _is_failure(got)
            for leg in bench.decode.legs:
                await _ended(leg, "decode", "the prefill leg has failed")
            assert bench.mode is Mode.PUSH or not bench.decode.legs
            await bench.settle()


async def failed_prefill_may_be_retried(bench: Bench) -> None:
    """The client is told so: 503, in JSON, and with the time to wait."""
    bench.prefill.behaviour.status = 500
    _is_retryable(await bench.post())


def _is_retryable(got: Got) -> None:
    assert got.status == 503, got
    error = got.json.get("error")
    assert isinstance(error, dict), got
    assert error.get("message"), error
    assert error.get("code") == 503, error
    assert error.get("retryable") is True, error
    assert "Retry-After" in got.headers, got.headers


async def refusals_are_passed_on(bench: Bench) -> None:
    """A request that P refuses is at fault itself; sending it again is no use."""
    bench.prefill.behaviour.status = 400
    got = await bench.post()
    assert got.status == 400, got
    assert got.json["error"]["message"] == "told to fail", got


async def failed_decode_is_no_answer(bench: Bench) -> None:
    """By status, by a broken connection, and by an error in a stream of 200."""
    for stream in (False, True):
        for fault in ("status", "break_off", "error_event"):
            behaviour = bench.decode.behaviour
            behaviour.status = 500 if fault == "status" else None
            behaviour.break_off = fault == "break_off"
            behaviour.error_event = fault == "error_event"
            _is_failure(await bench.post({"stream": stream}))
            await bench.settle()


async def failed_decode_may_be_retried(bench: Bench) -> None:
    """Also where the engine had begun a stream with 200 and then failed."""
    bench.decode.behaviour.error_event = True
    _is_retryable(await bench.post({"stream": True}))


async def failed_decode_ends_the_prefill(bench: Bench) -> None:
    """P would compute, and keep, what nobody takes."""
    hold = bench.prefill.behaviour.hold = asyncio.Event()
    bench.decode.behaviour.status = 500
    try:
        asked = asyncio.create_task(bench.post())
        await _ended(await bench.prefill.leg(), "prefill", "the decode leg has failed")
        _is_failure(await asked)
    finally:
        hold.set()


async def streams_that_break_off_do_not_end_well(bench: Bench) -> None:
    """The client must be able to tell."""
    bench.decode.behaviour.cut_after = 2
    got = await bench.post({"stream": True})
    assert not got.done, f"a stream that broke off looks whole: {got}"


async def another_try_has_another_name(bench: Bench) -> None:
    """Where P may have taken the request; what is not tried again is a failure.

    One that P refuses with 503 was not taken and may come again under its name.
    """
    bench.prefill.behaviour.break_computed = 1
    got = await bench.post()
    names = [leg.name for leg in bench.prefill.legs]
    if got.status == 200:
        assert got.texts == [answer_text(PROMPT)], got
    else:
        _is_failure(got)
    assert len(set(names)) == len(names), f"used again: {names}"


async def gone_engines_are_a_failure(bench: Bench) -> None:
    """Nobody listens at P's port."""
    await bench.prefill.stop()
    try:
        try:
            _is_failure(await bench.post())
        except aiohttp.ClientError as error:
            raise AssertionError(f"the router gave no answer: {error!r}") from error
    finally:
        await bench.prefill.start()
