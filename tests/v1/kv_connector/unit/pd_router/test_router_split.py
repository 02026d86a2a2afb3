# SPDX-License-Identifier: Apache-2.0
"""Lists of prompts through the whole router."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from pd_router.sse import event_data
from router_backends import (
    DONE,
    ERROR,
    Cluster,
    Seen,
    answers,
    completion,
    event,
    hangs,
    prefill_answer,
    streams,
    token,
)

pytestmark = pytest.mark.asyncio

PROMPTS = ["one", "two", "three"]


async def echo_whole(seen: Seen) -> web.StreamResponse:
    """Later prompts are answered first."""
    prompt = seen.body["prompt"]
    await asyncio.sleep(0.15 - 0.05 * PROMPTS.index(prompt))
    n = seen.body.get("n", 1)
    texts = [f"{prompt}-{i}" for i in range(n)]
    return web.json_response(completion(*texts, usage=(len(prompt), n)))


async def echo_stream(seen: Seen) -> web.StreamResponse:
    prompt = seen.body["prompt"]
    usage = {**completion(usage=(len(prompt), 2)), "choices": []}
    script = streams(
        token(f"{prompt} ", 0),
        token(f"{prompt} ", 1),
        token("end", 1, "stop"),
        token("end", 0, "length"),
        event(usage),
        DONE,
        gap=0.02,
    )
    return await script(seen)


def parsed(body: bytes) -> list[Any]:
    return [json.loads(d) for b in body.split(b"\n\n")[:-2] if (d := event_data(b))]


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_every_prompt_is_a_handoff_of_its_own(
    cluster: Cluster, mode: str
) -> None:
    await cluster.start(mode, answers(prefill_answer()), echo_whole)
    body = {"prompt": PROMPTS, "n": 2, "max_tokens": 5}
    got = await cluster.post(body, headers={"X-Request-Id": "mine"})
    assert got.status == 200
    assert [(c["index"], c["text"]) for c in got.json["choices"]] == [
        (0, "one-0"),
        (1, "one-1"),
        (2, "two-0"),
        (3, "two-1"),
        (4, "three-0"),
        (5, "three-1"),
    ]
    assert got.json["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 6,
        "total_tokens": 17,
    }
    assert got.json["id"] == "cmpl-mine"
    assert "kv_transfer_params" not in got.json
    for legs in (cluster.prefill[0].seen, cluster.decode[0].seen):
        assert sorted(leg.body["prompt"] for leg in legs) == sorted(PROMPTS)
        assert len({leg.params["transfer_id"] for leg in legs}) == 3
        assert len({leg.headers["x-request-id"] for leg in legs}) == 3
    assert {leg.params["num_receivers"] for leg in cluster.prefill[0].seen} == {2}


async def test_streams_are_merged(cluster: Cluster) -> None:
    await cluster.start("push", answers(), echo_stream)
    body = {
        "prompt": PROMPTS,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    got = await cluster.post(body)
    assert got.status == 200
    assert got.body.count(b"[DONE]") == 1
    assert got.body.endswith(DONE)
    chunks = parsed(got.body)
    texts: dict[int, str] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
    assert texts == {
        index: f"{PROMPTS[index // 2]} end" for index in range(2 * len(PROMPTS))
    }
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 6,
        "total_tokens": 17,
    }
    assert len({chunk["id"] for chunk in chunks}) == 1
    # They run side by side: the first events come before anybody has ended.
    assert len({c["choices"][0]["index"] // 2 for c in chunks[:6]}) > 1


async def test_a_bounded_number_runs_at_once(cluster: Cluster) -> None:
    running = most = 0

    async def script(seen: Seen) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return web.json_response(completion("a"))

    await cluster.start("push", answers(), script, split_concurrency=2)
    got = await cluster.post({"prompt": [[i, i] for i in range(7)]})
    assert [c["index"] for c in got.json["choices"]] == list(range(7))
    assert most == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_one_failed_part_fails_the_request_and_ends_the_others(
    cluster: Cluster, stream: bool
) -> None:
    async def script(seen: Seen) -> web.StreamResponse:
        if seen.body["prompt"] == "two":
            await asyncio.sleep(0.1)
            failing = streams(ERROR, DONE) if stream else answers({}, status=500)
            return await failing(seen)
        return await hangs()(seen)

    await cluster.start("push", answers(), script)
    got = await cluster.post({"prompt": PROMPTS, "stream": stream})
    failed = [s for s in cluster.decode[0].seen if s.body["prompt"] == "two"]
    assert got.status == 503
    assert got.error["transfer_id"] == failed[0].params["transfer_id"]
    for seen in cluster.decode[0].seen:
        if seen not in failed:
            async with asyncio.timeout(5):
                await seen.disconnected.wait()
    await cluster.quiet()


async def test_a_part_that_breaks_off_ends_the_stream_without_done(
    cluster: Cluster,
) -> None:
    async def script(seen: Seen) -> web.StreamResponse:
        broken = seen.body["prompt"] == "two"
        return await streams(token("a"), end="abort" if broken else "hang")(seen)

    await cluster.start("push", answers(), script)
    got = await cluster.post({"prompt": PROMPTS, "stream": True})
    assert got.status == 200
    assert b"[DONE]" not in got.body
    last = json.loads(event_data(got.body.split(b"\n\n")[-2]) or b"")
    assert last["error"]["cause"] == "decode_broken"
    await cluster.quiet()


async def test_an_error_event_of_a_part_is_passed_on_and_ends_the_stream(
    cluster: Cluster,
) -> None:
    async def script(seen: Seen) -> web.StreamResponse:
        if seen.body["prompt"] == "two":
            return await streams(token("a"), ERROR, DONE, gap=0.05)(seen)
        return await streams(token("a"), end="hang")(seen)

    await cluster.start("push", answers(), script)
    got = await cluster.post({"prompt": PROMPTS, "stream": True})
    assert got.body.endswith(ERROR)
    assert b"[DONE]" not in got.body


async def test_a_client_that_leaves_ends_all_parts(cluster: Cluster) -> None:
    await cluster.start("push", hangs(), streams(token("a"), end="hang"))
    asking = asyncio.create_task(cluster.post({"prompt": PROMPTS, "stream": True}))
    legs = [await cluster.decode[0].request(i) for i in range(3)]
    legs += [await cluster.prefill[0].request(i) for i in range(3)]
    asking.cancel()
    for leg in legs:
        async with asyncio.timeout(5):
            await leg.disconnected.wait()
    await cluster.quiet()


async def test_a_list_of_one_prompt_passes_byte_for_byte(cluster: Cluster) -> None:
    data = b'data: {"choices":  [{"text": "a"}]}\n\n' + DONE
    await cluster.start("push", answers(), streams(data))
    got = await cluster.post({"prompt": ["one"], "stream": True})
    assert got.body == data
    assert cluster.decode[0].seen[0].body["prompt"] == ["one"]


async def test_too_many_prompts_are_refused(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers(), max_prompts=2)
    got = await cluster.post({"prompt": PROMPTS})
    assert got.status == 400
    assert "at most 2" in got.error["message"]
    assert cluster.decode[0].seen == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_malformed_part_is_told_and_not_a_crash(
    cluster: Cluster, stream: bool
) -> None:
    odd = {"choices": [{"text": "no index"}]}
    script = streams(event(odd), DONE) if stream else answers(odd)
    await cluster.start("push", answers(), script)
    got = await cluster.post({"prompt": PROMPTS, "stream": stream})
    assert got.status == (200 if stream else 503)
    assert b"malformed" in got.body
    assert b"[DONE]" not in got.body
