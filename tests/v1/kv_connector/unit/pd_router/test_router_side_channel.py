# SPDX-License-Identifier: Apache-2.0
"""Failed hand-offs are explained by engines, asked over their real side channel."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pd_router.side_channel
from conversation_backends import Keeper
from pd_router.arguments import parse_args
from pd_router.config import Address, ConfigError, Mode, Role
from pd_router.server import main
from pd_router.side_channel import SideChannelClient, Token, UnansweredError
from router_backends import (
    DONE,
    ERROR,
    FAST,
    Cluster,
    Script,
    answers,
    completion,
    free_port,
    hangs,
    prefill_answer,
    streams,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import auth
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.records import (
    HandoffRecord,
    Records,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)

SECRET = b"0123456789abcdef0123456789abcdef"
PROMPT = {"prompt": "p"}
PATIENCE_S = 10.0


class Told(Keeper):
    """What an engine knows: any hand-off asked for, in the records that it keeps."""

    def __init__(self, role: str, outcome: str, cause: str = "") -> None:
        super().__init__()
        self.role, self.outcome, self.cause = role, outcome, cause
        self.asked: list[str] = []

    def failure(self, transfer_id: TransferId) -> object:
        self.asked.append(transfer_id)
        records = Records()
        records.add(
            HandoffRecord(
                transfer_id, RequestId("r"), self.role, self.outcome, self.cause
            )
        )
        return records.failure(transfer_id)


class Unaware(Told):
    """An engine that keeps no record of it."""

    def __init__(self) -> None:
        super().__init__("receiver", "failed")

    def failure(self, transfer_id: TransferId) -> object:
        self.asked.append(transfer_id)
        return Records().failure(transfer_id)


@contextmanager
def serving(reports: Told, token: auth.Token | None = None) -> Iterator[Address]:
    address = Address("127.0.0.1", free_port())
    server = SideChannelServer((address.host, address.port), [], reports, token)
    try:
        yield address
    finally:
        server.close()


def ask_at(cluster: Cluster, **addresses: Address) -> None:
    """Let the router know the side channels, as its options would."""
    for worker in cluster.router.workers:
        report_address = addresses.get(str(worker.role))
        worker.spec = replace(worker.spec, report_address=report_address)


FAILED = Told("receiver", "failed", "the prompts of the two legs differ")
SERVED = Told("sender", "served")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_a_failed_handoff_is_explained_by_both_engines(
    cluster: Cluster, mode: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    decode = streams(ERROR, DONE) if stream else answers({"error": {}}, status=500)
    await cluster.start(mode, answers(prefill_answer()), decode)
    with serving(FAILED) as at_decode, serving(SERVED) as at_prefill:
        ask_at(cluster, decode=at_decode, prefill=at_prefill)
        got = await cluster.post({**PROMPT, "stream": stream})
    transfer_id = cluster.decode[0].seen[0].params["transfer_id"]
    detail = (
        "decode engine: the prompts of the two legs differ; "
        "prefill engine: the hand-off's outcome is 'served'"
    )
    assert got.status == 503
    assert got.error["detail"] == detail
    assert got.error["transfer_id"] == transfer_id == FAILED.asked[-1]
    assert got.error["cause"] == ("decode_error_event" if stream else "decode_status")
    assert got.error["retryable"] is True
    [line] = [r.getMessage() for r in caplog.records if detail in r.getMessage()]
    assert transfer_id in line


async def test_every_part_of_a_list_is_explained_by_its_own_name(
    cluster: Cluster,
) -> None:
    await cluster.start("push", answers(), answers({"error": {}}, status=500))
    told = Told("receiver", "failed", "because")
    with serving(told) as at_decode:
        ask_at(cluster, decode=at_decode)
        got = await cluster.post({"prompt": ["a", "b"]})
    assert got.error["detail"] == "decode engine: because"
    assert got.error["transfer_id"] in told.asked


async def test_a_wait_that_runs_out_is_explained_after_the_legs_have_ended(
    cluster: Cluster,
) -> None:
    limits = replace(FAST, first_event=0.2, idle=0.1)
    await cluster.start("push", hangs(), hangs(), timeouts=limits)
    told = Told("receiver", "failed", "no KV came within 0.1 s")
    with serving(told) as at_decode:
        ask_at(cluster, decode=at_decode)
        got = await cluster.post(PROMPT)
    assert (got.status, got.error["cause"]) == (504, "decode_timeout")
    assert got.error["detail"] == "decode engine: no KV came within 0.1 s"


async def test_an_explanation_is_one_line_of_bounded_length(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.start("push", answers(), answers({"error": {}}, status=500))
    with serving(Told("receiver", "failed", "a\nERROR b\x1b[2J" + "x" * 9000)) as at:
        ask_at(cluster, decode=at)
        got = await cluster.post(PROMPT)
    detail = got.error["detail"]
    assert detail.startswith("decode engine: a\\nERROR b\\x1b[2Jxxx")
    assert len(detail) < 1100
    assert all(record.getMessage().isprintable() for record in caplog.records)


async def test_a_failed_prefill_of_pull_is_explained_by_prefill(
    cluster: Cluster,
) -> None:
    await cluster.start("pull", answers({"error": {}}, status=500), answers())
    with serving(Told("sender", "expired")) as at_prefill:
        ask_at(cluster, prefill=at_prefill)
        got = await cluster.post(PROMPT)
    assert got.error["cause"] == "prefill_status"
    assert got.error["detail"] == "prefill engine: the hand-off's outcome is 'expired'"


@pytest.mark.parametrize("told", [Unaware(), Told("receiver", "aborted")])
async def test_engines_that_know_nothing_add_nothing(
    cluster: Cluster, told: Told
) -> None:
    await cluster.start("push", answers(), answers({"error": {}}, status=500))
    with serving(told) as at_decode:
        ask_at(cluster, decode=at_decode)
        got = await cluster.post(PROMPT)
    assert told.asked
    assert got.status == 503
    assert "detail" not in got.error


@contextmanager
def garbage(data: bytes) -> Iterator[Address]:
    """A port where every connection gets these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    taken.append(listener.accept()[0])
                    taken[-1].sendall(data)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in taken:
                one.close()
            thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    "data",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64)],
    ids=["silence", "http", "zeros"],
)
async def test_a_lookup_that_fails_changes_nothing_else(
    cluster: Cluster, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_router.side_channel, "ANSWER_SECONDS", 0.3)
    await cluster.start("push", answers(), answers({"error": {}}, status=500))
    plain = await cluster.post(PROMPT)
    with garbage(data) as nobody:
        ask_at(cluster, decode=nobody, prefill=nobody)
        got = await cluster.post(PROMPT)
    told, expected = got.error, plain.error
    assert told.pop("transfer_id") != expected.pop("transfer_id")
    assert (got.status, told) == (plain.status, expected)
    assert got.headers["Retry-After"] == plain.headers["Retry-After"]
    assert await cluster.metric("pd_router_handoff_failures_total") == 2
    await cluster.quiet()


async def test_other_requests_go_on_while_an_engine_is_asked(cluster: Cluster) -> None:
    await cluster.start(
        "push", answers(), [answers({"error": {}}, status=500), answers()]
    )
    with garbage(b"") as nobody:
        ask_at(cluster, decode=nobody)
        failing = asyncio.create_task(cluster.post(PROMPT))
        await cluster.decode[0].request()
        await cluster.prefill[0].request()
        # The first worker is free again and the last one picked.
        got = await cluster.post(PROMPT)
        assert got.json == completion("hi")
        assert not failing.done()
        assert (await failing).status == 503


async def test_a_client_that_leaves_ends_the_lookup(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers({"error": {}}, status=500))
    with garbage(b"") as nobody:
        ask_at(cluster, decode=nobody)
        failing = asyncio.create_task(cluster.post(PROMPT))
        await (await cluster.decode[0].request()).finished.wait()
        failing.cancel()
        await cluster.quiet()
    assert (
        await cluster.metric("pd_router_requests_total", outcome="client_disconnect")
        == 1
    )


@pytest.mark.parametrize(
    ("decode", "extra"),
    [
        (None, {}),
        (answers({"error": {}}, status=500), {"echo": True, "logprobs": 1}),
        (answers({"error": {}}, status=400), {}),
    ],
)
async def test_nobody_is_asked_where_no_handoff_failed(
    cluster: Cluster, decode: Script | None, extra: dict[str, Any]
) -> None:
    await cluster.start("push", answers(), [decode])
    told = Told("receiver", "failed", "never asked")
    with serving(told) as address:
        ask_at(cluster, decode=address, prefill=address)
        got = await cluster.post({**PROMPT, **extra})
    assert got.status >= 400
    assert told.asked == []


async def test_prefill_alone_is_not_asked_in_push(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers({"error": {}}, status=500))
    told = Told("sender", "served")
    with serving(told) as at_prefill:
        ask_at(cluster, prefill=at_prefill)
        got = await cluster.post(PROMPT)
    assert "detail" not in got.error
    assert told.asked == []


# ---- the protocol, against the engine's own server


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_the_server_understands_the_client(secret: bytes | None) -> None:
    told = Told("receiver", "failed", "why: \u00fc")
    client = SideChannelClient(Token(secret) if secret else None)
    try:
        with serving(told, auth.Token(secret) if secret else None) as address:
            record = await client.record(address, "t-1")
            assert record is not None
            assert (record.outcome, record.cause) == ("failed", "why: \u00fc")
            assert told.asked == ["t-1"]
            with pytest.raises(UnansweredError, match="not a side-channel request"):
                await client.record(address, "x" * 513)
            assert await client.record(address, "t-2") is not None
        with serving(Unaware(), auth.Token(secret) if secret else None) as address:
            assert await client.record(address, "t-1") is None
    finally:
        client.close()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(None, SECRET), (SECRET[::-1], SECRET), (SECRET, None)]
)
async def test_without_the_engines_token_there_is_no_answer(
    ours: bytes | None, theirs: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_router.side_channel, "ANSWER_SECONDS", 0.5)
    told = Told("receiver", "failed", "secret")
    client = SideChannelClient(Token(ours) if ours else None)
    try:
        with (
            serving(told, auth.Token(theirs) if theirs else None) as address,
            pytest.raises(UnansweredError, match="no answer within"),
        ):
            await client.record(address, "t-1")
    finally:
        client.close()
    assert told.asked == []


async def test_an_engine_that_cannot_say_gives_its_reason() -> None:
    class Broken(Told):
        def failure(self, transfer_id: TransferId) -> object:
            raise KeyError("a defect")

    client = SideChannelClient()
    try:
        with (
            serving(Broken("receiver", "failed")) as address,
            pytest.raises(UnansweredError, match="a defect"),
        ):
            await client.record(address, "t-1")
    finally:
        client.close()


@pytest.mark.parametrize("record", [[], 7, "x", {}, {"outcome": 1}, {"outcome": ""}])
async def test_a_report_that_is_no_record_is_refused(record: object) -> None:
    class Odd(Told):
        def failure(self, transfer_id: TransferId) -> object:
            return record

    client = SideChannelClient()
    try:
        with (
            serving(Odd("receiver", "failed")) as address,
            pytest.raises(UnansweredError, match="no record"),
        ):
            await client.record(address, "t-1")
    finally:
        client.close()


async def test_a_wait_for_an_engine_is_bounded() -> None:
    client = SideChannelClient()
    try:
        with garbage(b"") as nobody:
            began = time.monotonic()
            with pytest.raises(UnansweredError, match="no answer within 1 s"):
                await client.record(nobody, "t-1")
            assert time.monotonic() - began < PATIENCE_S
    finally:
        client.close()


async def test_a_name_that_does_not_resolve_is_told() -> None:
    client = SideChannelClient()
    try:
        with pytest.raises(UnansweredError):
            await client.record(Address("no-such-host.invalid", 5600), "t-1")
    finally:
        client.close()


# ---- settings


def test_addresses_go_to_the_worker_in_the_same_place() -> None:
    config = parse_args(
        Mode.PULL,
        [
            *("--prefill", "a:1", "b:2", "--decode", "c:3", "d:4"),
            *("--prefill-side-channel", "a:5600", "b:5600"),
            *("--decode-side-channel", "c:5600", "--decode-side-channel", "[::1]:7"),
            *("--side-channel-token-file", "/token"),
        ],
    )
    assert [str(w.report_address) for w in config.workers] == [
        "a:5600",
        "b:5600",
        "c:5600",
        "[::1]:7",
    ]
    assert config.side_channel_token_file == "/token"


def test_push_knows_the_prefill_engines_side_channel() -> None:
    config = parse_args(
        Mode.PUSH,
        [
            *("--prefill", "a:1", "--decode", "c:3"),
            *("--prefill-side-channel-port", "5601"),
            *("--decode-side-channel", "c:5602"),
        ],
    )
    assert {w.role: str(w.report_address) for w in config.workers} == {
        Role.PREFILL: "a:5601",
        Role.DECODE: "c:5602",
    }


def test_without_the_options_nobody_is_asked() -> None:
    config = parse_args(Mode.PULL, ["--prefill", "a:1", "--decode", "c:3"])
    assert [w.report_address for w in config.workers] == [None, None]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--decode-side-channel", "c:1", "c:2"], "has 2 value(s) (c:1 c:2) for 1"),
        (["--decode-side-channel", "c"], "--decode-side-channel got 'c'"),
        (["--prefill-side-channel", "a:0"], "--prefill-side-channel got 'a:0'"),
    ],
)
def test_wrong_addresses_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    with pytest.raises(SystemExit):
        parse_args(Mode.PULL, ["--prefill", "a:1", "--decode", "c:3", *options])
    assert told in capsys.readouterr().err


def test_a_token_file_is_read_as_engines_read_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"  " + SECRET + b"\n")
    assert vars(Token.load(str(path))) == vars(Token(SECRET))
    for content in (b"short", bytes(4097)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"holds {len(content)} bytes"):
            Token.load(str(path))


def test_a_router_without_its_token_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none")
    options = ["--admin-key", "k", "--side-channel-token-file", missing]
    assert main(Mode.PUSH, options) == 2
    assert f"{missing!r} cannot be read" in capsys.readouterr().err


async def test_workers_are_added_with_their_side_channel(cluster: Cluster) -> None:
    await cluster.start("push", answers(), [], admin_key="k")
    failing = cluster.prefill[0]
    body = {"role": "decode", "address": str(failing.address)}

    async def add(**fields: Any) -> tuple[int, Any]:
        async with cluster.client.post(
            "/admin/workers", json={**body, **fields}, headers={"X-Admin-Key": "k"}
        ) as response:
            return response.status, await response.json()

    status, told = await add(address="127.0.0.1:9", side_channel="nonsense")
    assert status == 400
    assert "side_channel got 'nonsense'" in told["error"]["message"]
    status, told = await add(address="127.0.0.1:9", side_channel="127.0.0.1:5601")
    assert (status, told["side_channel"]) == (201, "127.0.0.1:5601")
    (worker,) = [w for w in cluster.router.workers if w.role is Role.DECODE]
    assert worker.spec.report_address == Address("127.0.0.1", 5601)
    shown = (await cluster.get("/status")).json["workers"]
    assert [w["side_channel"] for w in shown if w["role"] == "decode"] == [
        "127.0.0.1:5601"
    ]
    status, told = await add(
        role="prefill", address="127.0.0.1:8", side_channel_port=5602
    )
    assert status == 201
    addresses = {str(w.address): w.spec.report_address for w in cluster.router.workers}
    assert addresses["127.0.0.1:8"] == Address("127.0.0.1", 5602)


def test_a_router_does_not_load_the_engine() -> None:
    folder = Path(pd_router.side_channel.__file__).parents[1]
    code = (
        "import json, sys; import pd_router.server; "
        "print(json.dumps([m for m in ('vllm', 'torch') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == []
