# SPDX-License-Identifier: Apache-2.0
"""What one engine does in a measurement: requests at given times, steps between."""

import time
from dataclasses import dataclass, field

from microbench_engine import BenchmarkError, Engine, Seen, spin

DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Ask:
    """One request: its hand-off's name, its prompt and when it arrives.

    ``at`` is in nanoseconds of the host's monotonic clock. ``port`` is the side
    channel of the engine that computes the prompt; 0 on that engine itself.
    """

    name: str
    seed: int
    tokens: int
    at: int
    port: int = 0


@dataclass(frozen=True)
class Play:
    """One measurement on one engine.

    Attributes:
        busy: whether the forward pass computes in Python, or waits.
        step_seconds: length of a forward pass that has something to compute.
        token_seconds: what it takes longer for each token.
        slice_seconds: length of one that has not.
        layered: whether it goes through the layers and tells the connector of each.
        until: when to stop at the earliest, on the clock of ``Ask.at``.
    """

    asks: list[Ask]
    busy: bool = False
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    slice_seconds: float = 0.001
    until: int = 0
    layered: bool = False


@dataclass
class Played:
    """What came of it.

    Attributes:
        steps: CPU nanoseconds of the forward thread in the hooks of each step, on
            the scheduler side and on the worker side.
        dearest: CPU nanoseconds of the dearest call of each hook in one step.
        transfers: transfers under way at the end of each step.
        rounds: rounds of pure Python that the forward passes made.
        spun: seconds that they took.
        other_cpu: CPU seconds of all other threads of the process.
        cpu: CPU seconds of all threads of the process.
        wall: seconds that it took.
    """

    seen: dict[str, Seen]
    steps: list[tuple[int, int]] = field(default_factory=list)
    dearest: dict[str, int] = field(default_factory=dict)
    transfers: list[int] = field(default_factory=list)
    rounds: int = 0
    spun: float = 0.0
    other_cpu: float = 0.0
    cpu: float = 0.0
    wall: float = 0.0


class _Forward:
    """The forward pass."""

    def __init__(self, play: Play, engine: Engine) -> None:
        self._play = play
        self._engine = engine
        self.rounds = 0
        self.spun = 0.0

    def __call__(self, tokens: int) -> None:
        play = self._play
        seconds = play.slice_seconds
        if tokens:
            seconds = play.step_seconds + play.token_seconds * tokens
        if tokens and play.layered:
            for region in self._engine.caches:
                time.sleep(seconds / len(self._engine.caches))
                self._engine.worker.save_kv_layer(region, None, None)
            return
        if not play.busy:
            time.sleep(seconds)
            return
        start = time.perf_counter()
        self.rounds += spin(seconds)
        self.spun += time.perf_counter() - start


def run(engine: Engine, play: Play) -> Played:
    """Play it.

    Raises:
        BenchmarkError: a hand-off failed, or did not end in time.
    """
    forward = _Forward(play, engine)
    engine.steps.clear()
    engine.seen.clear()
    waiting = sorted(play.asks, key=lambda ask: ask.at, reverse=True)
    last = max((ask.at for ask in play.asks), default=0)
    deadline = max(last, play.until, time.monotonic_ns()) + int(DEADLINE_SECONDS * 1e9)
    begun, others, cpu = time.monotonic(), _other_cpu(), time.process_time()
    while waiting or engine.wants_steps or time.monotonic_ns() < play.until:
        now = time.monotonic_ns()
        if now > deadline:
            raise BenchmarkError(
                f"{len(engine.scheduler.requests)} requests did not end within "
                f"{DEADLINE_SECONDS:g} s; tables {engine.tables}"
            )
        while waiting and waiting[-1].at <= now:
            _add(engine, waiting.pop())
        engine.step(forward)
    return Played(
        dict(engine.seen),
        [(step.scheduler, step.worker) for step in engine.steps],
        _dearest(engine),
        [step.transfers for step in engine.steps],
        forward.rounds,
        forward.spun,
        _other_cpu() - others,
        time.process_time() - cpu,
        time.monotonic() - begun,
    )


def _add(engine: Engine, ask: Ask) -> None:
    params: dict[str, object] = {"transfer_id": ask.name}
    if ask.port:
        params |= {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": ask.port,
        }
    else:
        params["do_remote_decode"] = True
    engine.add(ask.name, ask.seed, ask.tokens, params)


def _dearest(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = {}
    for step in engine.steps:
        for hook, spent in step.hooks.items():
            found[hook] = max(spent, found.get(hook, 0))
    return found


def _other_cpu() -> float:
    return time.process_time() - time.thread_time()
