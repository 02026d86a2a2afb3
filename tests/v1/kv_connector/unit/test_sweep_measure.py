# SPDX-License-Identifier: Apache-2.0
"""How the kit measures a point: it checks engines, and a load generator may fail."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sweep
from sweep_points import Point
from sweep_proof import Engine, Observer, ProofError, movement, post
from v1.kv_connector.unit.sweep_samples import POINT, options


class FakeEngine:
    """What an engine answers to questions about itself."""

    def __init__(self) -> None:
        self.status = 200
        self.model = "Qwen"
        self.connector: str | None = "NixlPushConnector"
        self.prefix_caching = "False"
        self.asked: list[dict[str, Any]] = []
        # Bytes that the metrics tell of after so many steps; later ones add none.
        self.told: list[int] = [0]

        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = engine.pages().get(self.path)
                self._reply(404 if body is None else engine.status, body or "")

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                engine.asked.append(json.loads(self.rfile.read(length)))
                self._reply(engine.status, "{}")

            def log_message(self, *_: object) -> None:
                pass

            def _reply(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def pages(self) -> dict[str, str]:
        cached = f'enable_prefix_caching="{self.prefix_caching}"'
        lines = [f'vllm:cache_config_info{{block_size="32",{cached}}} 1.0']
        told = self.told[: len(self.asked) + 1][-1]
        lines.append(f"vllm:nixl_bytes_transferred_sum {told}.0")
        if self.connector is not None:
            lines.append(
                f'vllm:nixl_info{{connector="{self.connector}",backends="UCX"}} 1.0'
            )
        return {
            "/health": "",
            "/v1/models": json.dumps({"data": [{"id": self.model}]}),
            "/metrics": "\n".join(lines) + "\n",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def engines() -> Iterator[tuple[FakeEngine, FakeEngine]]:
    prefill, decode = FakeEngine(), FakeEngine()
    yield prefill, decode
    prefill.close()
    decode.close()


def observer(prefill: FakeEngine, *decode: FakeEngine, mode: str = "push") -> Observer:
    return Observer(
        mode,
        "Qwen",
        Engine(prefill.url, None),
        [Engine(engine.url, None) for engine in decode],
    )


def test_engines_that_fit_pass(engines: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = engines
    prefill.prefix_caching = "True"
    observer(prefill, decode).check(caches=False)
    decode.prefix_caching = "True"
    observer(prefill, decode).check(caches=True)
    prefill.connector = None
    observer(prefill, mode="single").check(caches=True)


@pytest.mark.parametrize(
    ("change", "value", "named"),
    [
        ("status", 503, "/health answered 503"),
        ("model", "Llama", "serves Llama, not 'Qwen': set SERVED_MODEL_NAME"),
        ("connector", None, "runs with connector None, MODE push needs NixlPush"),
        ("connector", "NixlConnector", "MODE push needs NixlPushConnector"),
        ("prefix_caching", "True", "prefix caching on, CACHES is off"),
    ],
)
def test_an_engine_that_does_not_fit_is_named(
    engines: tuple[FakeEngine, FakeEngine], change: str, value: Any, named: str
) -> None:
    prefill, decode = engines
    setattr(decode, change, value)
    with pytest.raises(ProofError, match=named) as caught:
        observer(prefill, decode).check(caches=False)
    assert decode.url in str(caught.value)


def test_a_single_engine_must_have_no_connector(
    engines: tuple[FakeEngine, FakeEngine],
) -> None:
    with pytest.raises(ProofError, match="MODE single needs None"):
        observer(engines[0], mode="single").check(caches=False)


def test_each_engine_is_given_a_step_to_report_in(
    engines: tuple[FakeEngine, FakeEngine],
) -> None:
    prefill, _ = engines
    asking = observer(prefill, mode="single")
    (state,) = asking.settled(asking.snapshot(), 4)
    assert state.block_size == 32
    assert prefill.asked == [{"model": "Qwen", "prompt": [5], "max_tokens": 1}]


def test_what_was_moved_before_a_point_is_told_before_it(
    engines: tuple[FakeEngine, FakeEngine],
) -> None:
    prefill, decode = engines
    prefill.told = [0, 500, 700]
    asking = observer(prefill, decode)
    before = asking.settled_before()
    assert len(prefill.asked) == len(decode.asked) == 3
    moved = movement("push", before, asking.snapshot())
    assert moved["bytes_transferred"] == 0


def test_a_refused_request_is_told(engines: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, _ = engines
    prefill.status = 404
    with pytest.raises(ProofError, match="answered 404"):
        post(f"{prefill.url}/v1/completions", {"model": "Qwen"})


# ---- the load generator


def measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, **changed: str
) -> dict[str, Any] | str:
    def command(_: sweep.Sweep, __: Point, result: Path) -> list[str]:
        return [sys.executable, "-c", code, str(result)]

    monkeypatch.setattr(sweep.Sweep, "_command", command)
    parsed = sweep._parser().parse_args(options(folder, "run", **changed))
    return sweep.Sweep(parsed)._bench(POINT)


def test_what_the_load_generator_writes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; print('hello'); open(sys.argv[1], 'w').write('{\"a\": 1}')"

    assert measured(tmp_path, monkeypatch, code) == {"a": 1}

    log = tmp_path / f"{POINT.name('push')}.log"
    assert log.read_text() == "hello\n"
    assert [path for path in tmp_path.iterdir() if path != log] == []


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("print('no tokenizer'); raise SystemExit(3)", "status 3"),
        ("print('no tokenizer', flush=True); import time; time.sleep(60)", "not done"),
    ],
)
def test_a_load_generator_that_fails_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, named: str
) -> None:
    changed = {"qps": "100", "point-timeout": "3"}
    text = measured(tmp_path, monkeypatch, code, **changed)
    assert isinstance(text, str)
    assert f"FAILED ({named}" in text
    assert "no tokenizer" in text


def test_the_load_generator_is_asked_for_the_point(tmp_path: Path) -> None:
    changed = {"prefix-len": "7", "base-url": "http://127.0.0.1:18"}
    parsed = sweep._parser().parse_args(options(tmp_path, "run", **changed))
    made = sweep.Sweep(parsed)._command(POINT, tmp_path / "x.bench")
    for option in (
        "--base-url=http://127.0.0.1:18",
        "--model=m",
        "--served-model-name=Qwen",
        "--request-rate=2",
        "--random-input-len=256",
        "--random-output-len=16",
        "--random-prefix-len=7",
        "--num-prompts=4",
        f"--seed={POINT.seed}",
        "--ready-check-timeout-sec=0",
        f"--result-dir={tmp_path}",
        "--result-filename=x.bench",
    ):
        assert option in made
    assert made[1:6] == ["-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
