# SPDX-License-Identifier: Apache-2.0
"""What a router's client is told when the engine behind its hand-off is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import replace

from fault_engines import Side
from fault_requests import Outcome, Verdict, healthy_asks, stage_ask, wrong
from fault_rules import Event, Rule
from fault_scenarios import BOUND_S, SLACK_S, World, aftermath, clear, ended
from handoff_client import completion
from handoff_engines import ROUTER_TIMEOUT_S
from pd_launcher import Router

ROUTED = ("whole", "streamed")


async def routed(world: World) -> Verdict:
    """The prefill engine stops while KV moves; a router stands in front."""
    router = Router(
        f"{world.pair.mode}-router-{world.pair.starts}",
        world.pair.mode,
        [world.pair.prefill],
        [world.pair.decode],
        world.pair.log_dir,
    )
    verdict = Verdict(problems={name: [] for name in ROUTED})
    try:
        router.start()
        await asyncio.to_thread(router.wait_ready, ROUTER_TIMEOUT_S)
        await _routed(world, verdict, router)
    finally:
        await asyncio.to_thread(router.stop)
    await aftermath(world, verdict)
    return verdict


async def _routed(world: World, verdict: Verdict, router: Router) -> None:
    pair = world.pair
    push = pair.mode == "push"
    side: Side = "P" if push else "D"
    kind = "WRITE" if push else "READ"
    mark = pair.control(side).mark()
    pair.control(side).add(moving=Rule("post", "hold", kind))
    tasks = {
        name: asyncio.create_task(
            world.requests.send(
                router,
                completion(stage_ask(f"routed_{name}")),
                asyncio.Event() if name == "streamed" else None,
            )
        )
        for name in ROUTED
    }

    def held() -> list[Event]:
        return [e for e in pair.control(side).events(mark) if e.fault == "hold"]

    deadline = time.monotonic() + SLACK_S
    while len(held()) < len(ROUTED):
        assert time.monotonic() < deadline, "the transfers were not posted"
        await asyncio.sleep(0.05)
    transfers = {event.transfer for event in held()}
    pair.signal("P", signal.SIGSTOP)
    try:
        deadline = time.monotonic() + BOUND_S
        for name, task in tasks.items():
            outcome = await ended(task, deadline)
            verdict.notes.append(f"{name}: {outcome}")
            ask = stage_ask(f"routed_{name}")
            verdict.add(name, _told(world, outcome, transfers))
            if outcome is not None:
                verdict.add(name, wrong(world.references, ask, outcome))
        clear(world)
    finally:
        pair.signal("P", signal.SIGCONT)
    log = pair.decode.log_path.read_text(errors="replace")
    if world.may_fail and not all(f"Hand-off {t} " in log for t in transfers):
        verdict.add_common(f"the decode engine's log does not name all of {transfers}")
    # The router may have set the prefill engine aside for a moment.
    deadline = time.monotonic() + SLACK_S
    ask = replace(healthy_asks()[0], stream=False)
    while True:
        outcome = await world.requests.send(router, completion(ask))
        if outcome.status == 200 or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    verdict.add_common(wrong(world.references, ask, outcome))
    if outcome.status != 200:
        verdict.add_common(f"the router does not recover: {outcome}")


def _told(world: World, outcome: Outcome | None, transfers: set[str]) -> str | None:
    """Say what is wrong with what the client was told."""
    if outcome is None:
        return "the client's request outlives the bound"
    if not world.may_fail:
        return None if outcome.status == 200 else f"not recomputed: {outcome}"
    if outcome.status != 503:
        return f"status 503 expected: {outcome}"
    try:
        error = json.loads(outcome.text)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error body: {outcome}"
    if error.get("retryable") is not True or error.get("code") != 503:
        return f"not retryable: {error}"
    if error.get("transfer_id") not in transfers:
        return f"transfer_id is none of {transfers}: {error}"
    if "lost" not in str(error.get("detail")) or not error.get("cause"):
        return f"no cause: {error}"
    return None
