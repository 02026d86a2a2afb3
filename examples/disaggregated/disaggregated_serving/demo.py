# SPDX-License-Identifier: Apache-2.0
"""Push and pull hand-off between two real engines, against a single engine.

Fetches a small model, asks one engine for reference answers, then sends the same
requests through a prefill and a decode engine with the push router, and again
with the pull router. The exit status is 0 only if every answer equals the single
engine's and no KV block is left in use.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from demo_output import (
    Moved,
    ProgressLine,
    Result,
    Round,
    after_prefill,
    print_result,
    table,
)
from demo_requests import demo_requests
from pd_client import Answer, Ask, RequestError, send
from pd_launcher import CONNECTORS, Engine, EngineConfig, Mode, Pair, pair, single
from pd_processes import ServerProcess, StartError

TOOLS = Path(__file__).resolve().parents[3] / "tools"
sys.path.insert(0, str(TOOLS))

from fetch_model import FetchError, fetch_model  # noqa: E402

SERVED_NAME = "smollm2"
REQUEST_TIMEOUT_S = 120.0
HANDOFF_TIMEOUT_S = 10.0
REST_TIMEOUT_S = 20.0

T = TypeVar("T")


class DemoError(RuntimeError):
    """The demo cannot go on; the text says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    arguments = _parse(argv)
    # So that the servers are stopped in order on these as well.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    log_dir = arguments.log_dir or Path(tempfile.mkdtemp(prefix="kv-demo-logs-"))
    keep = arguments.keep_logs or arguments.log_dir is not None
    status = 1
    try:
        status = _run(arguments.mode, log_dir)
    except (DemoError, FetchError, StartError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ndemo: interrupted; all servers are stopped", file=sys.stderr)
        status = 130
    if keep or status == 1:
        print(f"The servers' logs are in {log_dir}")
    else:
        shutil.rmtree(log_dir, ignore_errors=True)
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("push", "pull", "both"), default="both")
    parser.add_argument("--log-dir", type=Path, help="keep the servers' logs here")
    parser.add_argument(
        "--keep-logs", action="store_true", help="keep the logs after a success too"
    )
    return parser.parse_args(argv)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(mode: str, log_dir: Path) -> int:
    started = time.monotonic()
    print("Model: SmolLM2-135M-Instruct, float32", flush=True)
    model = fetch_model(log=lambda line: print(f"  {line}", flush=True))
    config = EngineConfig(model=str(model), served_model_name=SERVED_NAME)
    asks = demo_requests()
    reference = _single_round(config, asks, log_dir)
    if not reference.succeeded():
        raise DemoError("the single engine did not answer every request")
    modes: tuple[Mode, ...] = ("push", "pull")
    rounds = [
        _handoff_round(one, config, reference, log_dir)
        for one in modes
        if mode in (one, "both")
    ]
    print(f"\n{table([*rounds, reference])}")
    print(
        "\nEach engine computes on one thread. TTFT and TPOT are medians of the "
        "streamed requests. A hand-off's time is that from the end of its prefill to "
        "the first step of its decode."
    )
    for one in rounds:
        for text in one.leftovers:
            print(f"{one.name}: {text}")
    succeeded = all(one.succeeded() for one in rounds)
    verdict = "Success" if succeeded else "FAILED"
    print(f"{verdict} after {time.monotonic() - started:.0f} s")
    return 0 if succeeded else 1


def _single_round(config: EngineConfig, asks: list[Ask], log_dir: Path) -> Round:
    print("\nSingle engine (reference)")
    found = Round("single engine")
    with single(config, log_dir=log_dir, progress=ProgressLine().show) as engine:
        for number, ask in enumerate(asks, start=1):
            answer, error = _send(engine, ask)
            result = Result(ask, answer, error)
            found.results.append(result)
            print_result(number, len(asks), result)
    return found


def _handoff_round(
    mode: Mode, config: EngineConfig, reference: Round, log_dir: Path
) -> Round:
    print(f"\n{mode.capitalize()}: two engines and a router ({CONNECTORS[mode]})")
    found = Round(mode)
    with pair(mode, config, log_dir=log_dir, progress=ProgressLine().show) as servers:
        ledger = HandoffLedger(servers)
        for number, expected in enumerate(reference.results, start=1):
            answer, error = _send(servers.router, expected.ask)
            result = Result(expected.ask, answer, error)
            if answer is not None and expected.answer is not None:
                result = Result(
                    expected.ask,
                    answer,
                    moved=ledger.take(),
                    equal=answer.text == expected.answer.text,
                )
            found.results.append(result)
            print_result(number, len(reference.results), result)
        found.leftovers = _leftovers(servers)
        state = "; ".join(found.leftovers) or "no block is in use on either engine"
        print(f"  {state}")
    return found


class HandoffLedger:
    """Tells what each request moved, from the hand-offs that P and D report."""

    def __init__(self, servers: Pair) -> None:
        # Takes seconds, because it imports the engine's package, which also warns
        # of things that do not concern this process.
        with contextlib.redirect_stderr(io.StringIO()):
            import kv_integrity

        self._query = kv_integrity.handoffs
        self._prefill = servers.prefill
        self._decode = servers.decode
        self._seen: set[str] = set()
        self._new_entries()

    def take(self) -> Moved:
        """Return what has been moved since the last call.

        Raises:
            DemoError: no hand-off was reported within ten seconds, or one that
                is reported did not succeed.
        """
        entries = self._wait(self._decode, self._new_entries)
        for entry in entries:
            if entry["outcome"] not in ("received", "not_needed"):
                raise DemoError(
                    f"hand-off {entry['transfer_id']} ended as {entry['outcome']!r}: "
                    f"{entry.get('cause') or 'no cause given'}"
                )
        received = [entry for entry in entries if entry["outcome"] == "received"]
        return Moved(
            tokens=sum(entry["tokens"] for entry in entries),
            bytes=sum(entry["bytes"] for entry in entries),
            descriptors=sum(entry["descriptors"] for entry in entries),
            seconds=max((self._seconds(entry) for entry in received), default=None),
        )

    def _seconds(self, receiver: dict[str, Any]) -> float:
        senders = self._wait(
            self._prefill,
            lambda: [
                entry
                for entry in _side_channel(self._prefill, self._query)
                if entry["role"] == "sender"
                and entry["transfer_id"] == receiver["transfer_id"]
            ],
        )
        return after_prefill(senders[-1], receiver)

    @staticmethod
    def _wait(
        engine: Engine, entries: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        deadline = time.monotonic() + HANDOFF_TIMEOUT_S
        while not (found := entries()):
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{engine.name} reported no hand-off within "
                    f"{HANDOFF_TIMEOUT_S:.0f} s of an answer: see its log"
                )
            time.sleep(0.05)
        return found

    def _new_entries(self) -> list[dict[str, Any]]:
        entries = [
            entry
            for entry in _side_channel(self._decode, self._query)
            if entry["role"] == "receiver" and entry["transfer_id"] not in self._seen
        ]
        self._seen.update(entry["transfer_id"] for entry in entries)
        return entries


def _leftovers(servers: Pair) -> list[str]:
    import kv_integrity

    found = []
    for engine in (servers.prefill, servers.decode):
        # An idle engine releases what has been acknowledged in its next step.
        _answer, error = _send(engine, Ask("one more step", "The", 1, stream=False))
        if error:
            found.append(f"{engine.name} does not answer any more: {error}")
            continue
        state = _side_channel(
            engine,
            lambda address: kv_integrity.wait_released(address, REST_TIMEOUT_S),
        )
        if not kv_integrity.released(state):
            found.append(
                f"{engine.name}: {state['free_blocks']} of {state['total_blocks']} "
                f"blocks are free, pins {state['pins']}, tables {state['tables']}"
            )
    return found


def _side_channel(engine: Engine, query: Callable[[tuple[str, int]], T]) -> T:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
        SideChannelFailure,
    )

    try:
        return query((engine.host, engine.side_channel_port))
    except SideChannelFailure as error:
        raise DemoError(f"{engine.name}'s side channel: {error}") from error


def _send(server: ServerProcess, ask: Ask) -> tuple[Answer | None, str]:
    try:
        return send(server.host, server.port, SERVED_NAME, ask, REQUEST_TIMEOUT_S), ""
    except RequestError as error:
        return None, str(error)


if __name__ == "__main__":
    sys.exit(main())
