# SPDX-License-Identifier: Apache-2.0
"""What engines say was really moved while a point of a sweep was measured."""

from __future__ import annotations

import json
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]

SETTLE_S = 15.0
POLL_S = 0.2
HTTP_TIMEOUT_S = 30.0
MAX_RECORDS = 1024
"""How many finished hand-offs an engine remembers one by one."""

CONNECTORS = {"push": "NixlPushConnector", "pull": "NixlConnector"}
_ALIASES = {"NixlPullConnector": "NixlConnector"}

_BYTES = "vllm:nixl_bytes_transferred_sum"
_TRANSFERS = "vllm:nixl_bytes_transferred_count"
_DESCRIPTORS = "vllm:nixl_num_descriptors_sum"
_LOCAL_HITS = "vllm:prefix_cache_hits_total"
_EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
# A prompt of one token gives an engine a step to report in.
_NUDGE = (5,)


class ProofError(RuntimeError):
    """An engine cannot be asked, or is not what the sweep takes it for."""


@dataclass(frozen=True)
class Engine:
    """Where an engine serves, and where its side channel is, if it has one."""

    url: str
    side_channel: Address | None


@dataclass(frozen=True)
class State:
    """What one engine has told, at one moment.

    ``prompt_tokens`` are by where the engine got them from.
    """

    samples: Mapping[str, float] = field(default_factory=dict)
    block_size: int | None = None
    prefix_caching: bool | None = None
    connector: str | None = None
    backends: str | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    handoffs: Sequence[Mapping[str, Any]] = ()
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)

    def sample(self, name: str) -> float:
        """A metric's value; one that has not been counted yet is 0."""
        return self.samples.get(name, 0.0)


def parse_metrics(text: str) -> State:
    """Read what ``/metrics`` says; samples of several labels are summed."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, float] = {}
    prompt_tokens: dict[str, float] = {}
    block_size = prefix_caching = connector = backends = None
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
            if sample.name == "vllm:cache_config_info":
                block_size = int(sample.labels["block_size"])
                prefix_caching = sample.labels["enable_prefix_caching"] == "True"
            elif sample.name == "vllm:nixl_info":
                name = sample.labels["connector"]
                connector = _ALIASES.get(name, name)
                backends = sample.labels["backends"]
            elif sample.name == _PROMPT_TOKENS:
                source = sample.labels["source"]
                prompt_tokens[source] = prompt_tokens.get(source, 0.0) + sample.value
    return State(
        samples,
        block_size,
        prefix_caching,
        connector,
        backends,
        prompt_tokens=prompt_tokens,
    )


class Observer:
    """Asks the engines of one sweep.

    Args:
        mode: ``push``, ``pull``, or ``single``, which has no ``decode``.
        model: as it is served.
        token: what the side channels ask for, if they do.
    """

    def __init__(
        self,
        mode: str,
        model: str,
        prefill: Engine,
        decode: Sequence[Engine],
        token: Any = None,
    ) -> None:
        self.mode = mode
        self.model = model
        self.prefill = prefill
        self.decode = tuple(decode)
        self._token = token

    def check(self, *, caches: bool) -> None:
        """Refuse engines that would fail, or measure something else, later.

        Raises:
            ProofError: one is not healthy, serves another model, has another
                connector than the mode needs, or other caches than D should have.
        """
        engines = (self.prefill, *self.decode)
        for engine in engines:
            _get(f"{engine.url}/health")
            listed = json.loads(_get(f"{engine.url}/v1/models"))["data"]
            served = [one["id"] for one in listed]
            if self.model not in served:
                raise ProofError(
                    f"{engine.url} serves {', '.join(served)}, not {self.model!r}: "
                    "set SERVED_MODEL_NAME to the same here and in serve_pd.sh"
                )
            state = parse_metrics(_get(f"{engine.url}/metrics"))
            wanted = CONNECTORS.get(self.mode)
            if state.connector != wanted:
                raise ProofError(
                    f"{engine.url} runs with connector {state.connector}, MODE "
                    f"{self.mode} needs {wanted}: start serve_pd.sh with the same MODE"
                )
            decodes = len(engines) == 1 or engine is not self.prefill
            if decodes and state.prefix_caching is not caches:
                raise ProofError(
                    f"{engine.url} runs with prefix caching "
                    f"{'on' if state.prefix_caching else 'off'}, CACHES is "
                    f"{'on' if caches else 'off'}: start serve_pd.sh with the same "
                    "CACHES"
                )

    def snapshot(self) -> list[State]:
        """The engines' states, the prefill engine's first."""
        return [self._state(engine) for engine in (self.prefill, *self.decode)]

    def settled_before(self) -> list[State]:
        """The states before a point, once all is told of what went before it.

        That is so when steps bring nothing new, or after 15 s.
        """
        last = self.snapshot()
        deadline = time.monotonic() + SETTLE_S
        while True:
            self._nudge()
            time.sleep(POLL_S)
            now = self.snapshot()
            if self.mode == "single" or time.monotonic() > deadline:
                return now
            moved = movement(self.mode, last, now)
            if not (moved["bytes_transferred"] or moved["bytes_recorded"]):
                return now
            last = now

    def settled(self, before: Sequence[State], requests: int) -> list[State]:
        """The states once all is told of so many requests, or after 15 s.

        Engines count what a step did when the next one runs, so each is given one.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            self._nudge()
            after = self.snapshot()
            if self._complete(before, after, requests) or time.monotonic() > deadline:
                return after
            time.sleep(POLL_S)

    def _nudge(self) -> None:
        for engine in (self.prefill, *self.decode):
            body = {"model": self.model, "prompt": list(_NUDGE), "max_tokens": 1}
            _post(f"{engine.url}/v1/completions", body)

    def _complete(
        self, before: Sequence[State], after: Sequence[State], requests: int
    ) -> bool:
        if self.mode == "single":
            return True
        moved = movement(self.mode, before, after)
        ended = moved["requests_handed_over"] + moved["requests_not_needed"]
        told = ended + moved["handoffs_failed"] >= requests
        return bool(told and moved["bytes_transferred"] == moved["bytes_recorded"])

    def _state(self, engine: Engine) -> State:
        told = parse_metrics(_get(f"{engine.url}/metrics"))
        if engine.side_channel is None:
            return told
        import kv_integrity
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
            SideChannelFailure,
        )

        try:
            counters = kv_integrity.integrity(engine.side_channel, token=self._token)
            handoffs = kv_integrity.handoffs(engine.side_channel, token=self._token)
        except SideChannelFailure as error:
            host, port = engine.side_channel
            raise ProofError(
                f"the side channel {host}:{port} of {engine.url} did not answer "
                f"({error}): open the port to this node, too"
            ) from error
        return State(
            told.samples,
            told.block_size,
            told.prefix_caching,
            told.connector,
            told.backends,
            counters["counters"],
            handoffs,
        )


def movement(
    mode: str, before: Sequence[State], after: Sequence[State]
) -> dict[str, Any]:
    """What was moved between two snapshots of a prefill and of decode engines."""
    movers = (0,) if mode == "push" else range(1, len(after))

    def counted(name: str) -> float:
        return sum(after[i].sample(name) - before[i].sample(name) for i in movers)

    def told(name: str, i: int) -> int:
        return after[i].counters.get(name, 0) - before[i].counters.get(name, 0)

    def received(name: str) -> int:
        return sum(told(f"receiver_{name}", i) for i in range(1, len(after)))

    handed_over = received("received")
    descriptors = int(counted(_DESCRIPTORS))
    seconds = _new_seconds(before, after)
    return {
        "requests_handed_over": handed_over,
        "requests_handed_over_by_d": [
            told("receiver_received", i) for i in range(1, len(after))
        ],
        "requests_not_needed": received("not_needed"),
        "handoffs_failed": received("failed") + received("aborted"),
        "tokens_transferred": received("tokens"),
        "bytes_transferred": int(counted(_BYTES)),
        "bytes_recorded": received("bytes"),
        "transfers": int(counted(_TRANSFERS)),
        "descriptors": descriptors,
        "descriptors_per_request": descriptors / handed_over if handed_over else None,
        "handoff_records": len(seconds),
        "handoff_seconds_median": statistics.median(seconds) if seconds else None,
    }


def prove(
    mode: str,
    before: Sequence[State],
    after: Sequence[State],
    client: Mapping[str, Any],
) -> dict[str, Any]:
    """The proof of one point; what does not apply to the mode is ``None``.

    ``client`` is what the load generator has written. Hit rates are shares of all
    prompt tokens.
    """
    prompt_tokens = client["total_input_tokens"]

    def share(name: str, engines: Sequence[int]) -> float | None:
        hits = sum(after[i].sample(name) - before[i].sample(name) for i in engines)
        return hits / prompt_tokens if prompt_tokens else None

    seconds = client["duration"]
    disaggregated = mode != "single"
    decode = range(1, len(after)) if disaggregated else ()
    proof: dict[str, Any] = {
        "achieved_rate": client["completed"] / seconds if seconds else None,
        "connector": after[0].connector,
        "backends": after[0].backends,
        "block_size_p": after[0].block_size,
        "block_size_d": after[1].block_size if disaggregated else None,
        "prefix_caching_p": after[0].prefix_caching,
        "prefix_caching_d": after[1].prefix_caching if disaggregated else None,
        "prefix_hit_rate_p": share(_LOCAL_HITS, (0,)),
        "prefix_hit_rate_d": share(_LOCAL_HITS, decode) if disaggregated else None,
        "external_hit_rate_d": share(_EXTERNAL_HITS, decode) if disaggregated else None,
    }
    moved = movement(mode, before, after)
    if not disaggregated:
        moved = dict.fromkeys(moved)
    return {**proof, **moved}


def _new_seconds(before: Sequence[State], after: Sequence[State]) -> list[float]:
    seconds = []
    for old, new in zip(before[1:], after[1:], strict=True):
        known = {record["request_id"] for record in old.handoffs}
        seconds += [
            float(record["seconds"])
            for record in new.handoffs
            if record["role"] == "receiver"
            and record["outcome"] == "received"
            and record["request_id"] not in known
        ]
    return seconds


def _get(url: str) -> str:
    return _open(urllib.request.Request(url))


def _post(url: str, body: Mapping[str, Any]) -> str:
    headers = {"Content-Type": "application/json"}
    return _open(urllib.request.Request(url, json.dumps(body).encode(), headers))


def post(url: str, body: Mapping[str, Any]) -> str:
    """Send a request and read its answer.

    Raises:
        ProofError: another status than 200, or no answer.
    """
    return _post(url, body)


def _open(request: urllib.request.Request) -> str:
    try:
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
            text: str = response.read().decode()
    except urllib.error.HTTPError as error:
        reply = error.read(500).decode(errors="replace")
        raise ProofError(
            f"{request.full_url} answered {error.code}: {reply}"
        ) from error
    except OSError as error:
        raise ProofError(
            f"{request.full_url} did not answer ({error}): is it started, and its port "
            "open to this node?"
        ) from error
    return text
