# SPDX-License-Identifier: Apache-2.0
"""What operators and clients rely on around the requests themselves."""

import asyncio
import json
import logging

import pytest

from pd_router.config import Role
from router_backends import (
    DONE,
    Cluster,
    Engine,
    answers,
    completion,
    hangs,
    streams,
    token,
)

pytestmark = pytest.mark.asyncio

PROMPT = {"prompt": "p"}
KEY = {"X-Admin-Key": "k"}


async def test_ready_follows_the_engines_health_is_the_routers_own(
    cluster: Cluster,
) -> None:
    await cluster.start("push", answers(), answers(), health_interval=0.05)
    ready = await cluster.get("/ready")
    assert (ready.status, ready.json["healthy"]) == (200, {"prefill": 1, "decode": 1})

    async def becomes(status: int) -> None:
        async with asyncio.timeout(5):
            while (await cluster.get("/ready")).status != status:
                await asyncio.sleep(0.02)

    cluster.decode[0].health = 500
    await becomes(503)
    assert (await cluster.get("/health")).status == 200
    got = await cluster.post(PROMPT)
    assert (got.status, got.error["type"]) == (503, "no_worker")
    cluster.decode[0].health = 200
    await becomes(200)
    await cluster.prefill[0].stop()
    await becomes(503)
    await cluster.prefill[0].start()
    await becomes(200)
    assert (await cluster.post(PROMPT)).status == 200


async def test_an_unhealthy_worker_gets_nothing(cluster: Cluster) -> None:
    await cluster.start("push", answers(), [answers(), answers()], health_interval=0.05)
    cluster.decode[0].health = 503
    async with asyncio.timeout(5):
        while (await cluster.get("/ready")).json["healthy"]["decode"] != 1:
            await asyncio.sleep(0.02)
    for _ in range(4):
        assert (await cluster.post(PROMPT)).status == 200
    assert [len(e.seen) for e in cluster.decode] == [0, 4]


async def test_models_come_from_an_engine(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers())
    got = await cluster.get("/v1/models")
    assert (got.status, got.json) == (200, cluster.decode[0].model_list)
    for worker in cluster.router.workers:
        worker.mark_down("gone")
    assert (await cluster.get("/v1/models")).status == 503


async def test_status_shows_workers_and_no_prompts(cluster: Cluster) -> None:
    await cluster.start("push", hangs(), hangs())
    asking = asyncio.create_task(cluster.post({"prompt": "secret words"}))
    await cluster.decode[0].request()
    got = await cluster.get("/status")
    state = got.json
    assert (state["mode"], state["in_flight"], state["ready"]) == ("push", 1, True)
    prefill, decode = state["workers"]
    assert prefill["address"] == str(cluster.prefill[0].address)
    assert prefill["side_channel"]["engine_id"] == "engine-p"
    assert (prefill["outstanding"], decode["outstanding"]) == (1, 1)
    assert b"secret" not in got.body
    asking.cancel()


async def test_metrics_name_workers_modes_and_outcomes(cluster: Cluster) -> None:
    await cluster.start("push", answers(), streams(token("a"), DONE))
    await cluster.post({"prompt": "p", "stream": True})
    await cluster.post({"prompt": "p", "kv_transfer_params": {}})
    await cluster.quiet()
    count = "pd_router_requests_total"
    where = {"mode": "push", "endpoint": "/v1/completions"}
    assert await cluster.metric(count, outcome="ok", **where) == 1
    assert await cluster.metric(count, outcome="rejected", **where) == 1
    for role, engine in (("prefill", cluster.prefill), ("decode", cluster.decode)):
        worker = str(engine[0].address)
        labels = {"role": role, "worker": worker}
        assert await cluster.metric("pd_router_worker_picked_total", **labels) == 1
        assert await cluster.metric("pd_router_worker_healthy", **labels) == 1
        assert await cluster.metric("pd_router_worker_outstanding", **labels) == 0


async def test_workers_come_and_go_at_run_time(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers(), admin_key="k")
    extra = Engine(answers(completion("new")))
    cluster.decode.append(extra)
    await extra.start()
    added = {"role": "decode", "address": str(extra.address)}
    async with cluster.client.post(
        "/admin/workers", json=added, headers=KEY
    ) as response:
        assert response.status == 201
        assert (await response.json())["healthy"] is True
    async with cluster.client.post(
        "/admin/workers", json=added, headers=KEY
    ) as response:
        assert response.status == 409
    for _ in range(4):
        await cluster.post(PROMPT)
    assert [len(e.seen) for e in cluster.decode] == [2, 2]

    old = {"role": "decode", "address": str(cluster.decode[0].address)}
    for status in (200, 404):
        async with cluster.client.delete(
            "/admin/workers", params=old, headers=KEY
        ) as response:
            assert response.status == status
    for _ in range(4):
        await cluster.post(PROMPT)
    assert [len(e.seen) for e in cluster.decode] == [2, 6]
    assert old["address"] not in (await cluster.get("/metrics")).body.decode()


async def test_a_removed_worker_finishes_what_it_has(cluster: Cluster) -> None:
    await cluster.start(
        "push", answers(), answers(completion("late"), after=0.3), admin_key="k"
    )
    asking = asyncio.create_task(cluster.post(PROMPT))
    await cluster.decode[0].request()
    for role, engine in (("decode", cluster.decode), ("prefill", cluster.prefill)):
        params = {"role": role, "address": str(engine[0].address)}
        async with cluster.client.delete(
            "/admin/workers", params=params, headers=KEY
        ) as response:
            assert response.status == 200
    assert (await asking).json == completion("late")
    assert (await cluster.post(PROMPT)).status == 503


async def test_an_added_prefill_has_a_side_channel(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers(), admin_key="k")
    extra = Engine(answers())
    cluster.prefill.append(extra)
    await extra.start()
    body = {
        "role": "prefill",
        "address": str(extra.address),
        "side_channel_port": 5700,
        "engine_id": "e2",
        "tp_size": 4,
    }
    async with cluster.client.post(
        "/admin/workers", json=body, headers=KEY
    ) as response:
        assert response.status == 201
    for _ in range(2):
        assert (await cluster.post(PROMPT)).status == 200
    params = [s.params for s in cluster.decode[0].seen]
    new = next(p for p in params if p["remote_port"] == 5700)
    assert (new["remote_engine_id"], new["tp_size"], new["pp_size"]) == ("e2", 4, 1)


@pytest.mark.parametrize(
    ("key", "given", "status"),
    [(None, "k", 403), (None, None, 403), ("k", None, 401), ("k", "wrong", 401)],
)
async def test_workers_are_safe_from_strangers(
    cluster: Cluster, key: str | None, given: str | None, status: int
) -> None:
    await cluster.start("push", answers(), answers(), admin_key=key)
    headers = {"X-Admin-Key": given} if given else {}
    where = {"role": "decode", "address": str(cluster.decode[0].address)}
    async with cluster.client.post(
        "/admin/workers", json=where, headers=headers
    ) as response:
        assert response.status == status
    async with cluster.client.delete(
        "/admin/workers", params=where, headers=headers
    ) as response:
        assert response.status == status
    assert len(list(cluster.router.workers)) == 2


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ({"role": "both", "address": "a:1"}, "role is 'both'"),
        ({"role": "decode", "address": "a"}, "not host:port"),
        (
            {"role": "decode", "address": "a:1", "tp_size": 2},
            "unknown field(s) tp_size",
        ),
        ({"role": "prefill", "address": "a:1", "tp_size": 0}, "tp-size got '0'"),
    ],
)
async def test_a_wrong_worker_is_refused_with_the_reason(
    cluster: Cluster, body: object, told: str
) -> None:
    await cluster.start("push", answers(), answers(), admin_key="k")
    raw = body if isinstance(body, str) else json.dumps(body)
    async with cluster.client.post("/admin/workers", data=raw, headers=KEY) as response:
        assert response.status == 400
        assert told in (await response.json())["error"]["message"]


@pytest.mark.parametrize("params", [{"transfer_id": "stolen"}, {}, "x"])
async def test_handoff_parameters_from_clients_are_refused(
    cluster: Cluster, params: object
) -> None:
    await cluster.start("push", answers(), answers())
    got = await cluster.post({"prompt": "p", "kv_transfer_params": params})
    assert got.status == 400
    assert got.error["param"] == "kv_transfer_params"
    assert "not accepted from clients" in got.error["message"]
    assert cluster.prefill[0].seen == cluster.decode[0].seen == []


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"", b"\xff"])
async def test_a_body_that_is_no_object_is_refused(
    cluster: Cluster, raw: bytes
) -> None:
    await cluster.start("push", answers(), answers())
    async with cluster.client.post("/v1/completions", data=raw) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]


async def test_the_model_is_checked_and_filled_in(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers(), model="tiny")
    got = await cluster.post({"prompt": "p", "model": "huge"})
    assert (got.status, got.error["type"]) == (404, "NotFoundError")
    assert "'huge'" in got.error["message"]
    assert (await cluster.post({"prompt": "p", "model": "tiny"})).status == 200
    assert (await cluster.post({"prompt": "p"})).status == 200
    for engine in (*cluster.prefill, *cluster.decode):
        assert [seen.body["model"] for seen in engine.seen] == ["tiny", "tiny"]


async def test_adapters_are_served_beside_the_model(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers(), model="tiny", adapters=("a",))
    assert (await cluster.post({"prompt": "p", "model": "a"})).status == 200
    got = await cluster.post({"prompt": "p", "model": "b"})
    assert got.status == 404
    assert "'tiny', 'a'" in got.error["message"]
    for engine in (*cluster.prefill, *cluster.decode):
        assert [seen.body["model"] for seen in engine.seen] == ["a"]


async def test_a_data_parallel_rank_is_named_to_its_engine(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers(), ranks={Role.PREFILL: 1})
    assert (await cluster.post({"prompt": "p"})).status == 200
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    assert prefill.seen[0].headers["x-data-parallel-rank"] == "1"
    assert "x-data-parallel-rank" not in decode.seen[0].headers
    (worker,) = (w for w in cluster.router.workers if w.role is Role.PREFILL)
    assert str(worker.address).endswith("@1")


async def test_without_a_configured_model_bodies_stay(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers())
    await cluster.post({"prompt": "p"})
    await cluster.post({"prompt": "p", "model": "any"})
    assert "model" not in cluster.decode[0].seen[0].body
    assert cluster.decode[0].seen[1].body["model"] == "any"


async def test_a_request_id_is_made_where_none_is_usable(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers())
    first = await cluster.post(PROMPT)
    second = await cluster.post(PROMPT, headers={"X-Request-Id": "x" * 500})
    ids = [got.headers["X-Request-Id"] for got in (first, second)]
    assert ids[0] != ids[1]
    assert all(len(made) == 32 for made in ids)


async def test_only_headers_that_mean_the_same_there_are_forwarded(
    cluster: Cluster,
) -> None:
    await cluster.start("push", answers(), answers())
    sent = {
        "Authorization": "Bearer t",
        "traceparent": "00-1",
        "X-Admin-Key": "k",
        "Cookie": "c=1",
        "X-data-parallel-rank": "3",
    }
    await cluster.post(PROMPT, headers=sent)
    for leg in (cluster.prefill[0].seen[0], cluster.decode[0].seen[0]):
        assert leg.headers["authorization"] == "Bearer t"
        assert leg.headers["traceparent"] == "00-1"
        assert leg.headers["host"] != f"127.0.0.1:{cluster.router.config.port}"
        for name in ("x-admin-key", "cookie", "x-data-parallel-rank"):
            assert name not in leg.headers


async def test_logs_name_the_transfer_and_not_the_prompt(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = [token(str(i)) for i in range(50)]
    await cluster.start("push", answers(), streams(*chunks, DONE))
    with caplog.at_level(logging.DEBUG, logger="pd_router"):
        caplog.clear()
        await cluster.post(
            {"prompt": "secret words", "stream": True},
            headers={"X-Request-Id": "mine"},
        )
        await cluster.quiet()
    lines = [r.getMessage() for r in caplog.records if r.name == "pd_router"]
    transfer_id = cluster.decode[0].seen[0].params["transfer_id"]
    assert any(transfer_id in line and "mine" in line for line in lines)
    assert any(str(cluster.prefill[0].address) in line for line in lines)
    assert len(lines) < 10
    assert not any("secret" in line for line in lines)
