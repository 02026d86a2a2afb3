# SPDX-License-Identifier: Apache-2.0
"""Puts hand-offs into the stages in which a fault is to meet them.

A hand-off that is in a stage has been seen there in its engines' event logs, and
stays there until the control files let it go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from fault_engines import FaultPair, Side
from fault_requests import HandOff, Requests, stage_ask
from fault_rules import Event, Rule

STAGE_TIMEOUT_S = 20.0
SLOW_STEP_S = 0.4
SLOW_DECODE_STEP_S = 0.03

PUSH_STAGES = (
    "before_registration",
    "registered",
    "mid_write",
    "written",
    "decoding",
    "mid_prefill",
)
FLEETING = ("decoding", "mid_prefill")
"""These go on by themselves, so they are entered last."""

PULL_STAGES = ("finished", "leased", "mid_read", "read", "decoding", "mid_prefill")


class Stages:
    """The hand-offs of one scenario, by stage."""

    def __init__(self, requests: Requests, pair: FaultPair) -> None:
        self.hand_offs: dict[str, HandOff] = {}
        self._requests = requests
        self._pair = pair

    async def reach(self, stages: Iterable[str]) -> None:
        """Put one hand-off into each of ``stages``.

        Raises:
            AssertionError: one does not get there in time.
        """
        known: dict[str, Callable[[str], Awaitable[None]]] = {
            "before_registration": self._before_registration,
            "registered": self._registered,
            "mid_write": self._mid_write,
            "written": self._written,
            "finished": self._finished,
            "leased": self._leased,
            "mid_read": self._mid_read,
            "read": self._read,
            "decoding": self._decoding,
            "mid_prefill": self._mid_prefill,
        }
        for stage in stages:
            await known[stage](stage)

    def new(self, stage: str) -> HandOff:
        """A hand-off for a stage, of which no leg has been sent."""
        made = HandOff(self._requests, self._pair, stage, stage_ask(stage))
        self.hand_offs[stage] = made
        return made

    async def see(self, side: Side, what: str, fits: Callable[[Event], bool]) -> None:
        """Wait for an event in the log of one side."""
        await asyncio.to_thread(
            self._pair.control(side).wait, what, fits, STAGE_TIMEOUT_S
        )

    async def _before_registration(self, stage: str) -> None:
        rule = Rule("send", "drop", "register", f"{stage}.")
        self._pair.control("D").add(**{stage: rule})
        hand_off = self._both_legs(stage)
        await self._see_fault("D", hand_off, "drop")
        await hand_off.prefilled()

    async def _registered(self, stage: str) -> None:
        hand_off = self.new(stage)
        hand_off.send_decode()
        await self._see_known("P", hand_off, "receive", "register")

    async def _mid_write(self, stage: str) -> None:
        rule = Rule("post", "hold", "WRITE", f"{stage}.")
        self._pair.control("P").add(**{stage: rule})
        hand_off = self._both_legs(stage)
        await self._see_fault("P", hand_off, "hold")
        await hand_off.prefilled()

    async def _written(self, stage: str) -> None:
        self._pair.control("P").add(
            written=Rule("post", "mute", "WRITE", f"{stage}."),
            finished=Rule("send", "drop", "finished", f"{stage}."),
        )
        hand_off = self._both_legs(stage)
        await self._see_known("P", hand_off, "posted", "WRITE")
        await hand_off.prefilled()

    async def _finished(self, stage: str) -> None:
        hand_off = self.new(stage)
        hand_off.send_prefill()
        outcome = await hand_off.prefilled()
        assert outcome.status == 200, outcome

    async def _leased(self, stage: str) -> None:
        rule = Rule("receive", "drop", "lease_granted", f"{stage}.")
        # By a hint it would be read before the lease is granted.
        await self._pulled(stage, rule, "drop", hint=False)

    async def _mid_read(self, stage: str) -> None:
        await self._pulled(stage, Rule("post", "hold", "READ", f"{stage}."), "hold")

    async def _read(self, stage: str) -> None:
        # Either would end it.
        self._pair.control("D").add(
            granted=Rule("receive", "drop", "lease_granted", f"{stage}.")
        )
        rule = Rule("receive", "drop", "read_confirmed", f"{stage}.")
        await self._pulled(stage, rule, "drop", kind="read_confirmed")

    async def _pulled(
        self, stage: str, rule: Rule, fault: str, hint: bool = True, kind: str = ""
    ) -> None:
        self._pair.control("D").add(**{stage: rule})
        await self._finished(stage)
        self.hand_offs[stage].send_decode(hint=hint)
        await self._see_fault("D", self.hand_offs[stage], fault, kind)

    async def _decoding(self, stage: str) -> None:
        self._pair.control("D").change(step_delay=SLOW_DECODE_STEP_S)
        hand_off = self.new(stage)
        hand_off.send_prefill()
        if self._pair.mode == "pull":
            await hand_off.prefilled()
        hand_off.send_decode()
        await asyncio.wait_for(hand_off.first_event.wait(), STAGE_TIMEOUT_S)

    async def _mid_prefill(self, stage: str) -> None:
        control = self._pair.control("P")
        control.change(step_delay=SLOW_STEP_S)
        mark = control.mark()
        hand_off = self.new(stage)
        hand_off.send_prefill()
        if self._pair.mode == "push":
            hand_off.send_decode()
            await self._see_known("P", hand_off, "receive", "register")
        while sum(event.what == "step" for event in control.events(mark)) < 3:
            await asyncio.sleep(0.02)
        assert not any(
            event.what == "offer" and event.transfer == hand_off.transfer_id
            for event in control.events(mark)
        ), "the prompt was computed too fast to be met by a fault"

    def _both_legs(self, stage: str) -> HandOff:
        hand_off = self.new(stage)
        hand_off.send_prefill()
        hand_off.send_decode()
        return hand_off

    async def _see_fault(
        self, side: Side, hand_off: HandOff, fault: str, kind: str = ""
    ) -> None:
        await self.see(
            side,
            f"{fault} of {hand_off.name}",
            lambda e: (
                e.transfer == hand_off.transfer_id
                and e.fault == fault
                and kind in ("", e.kind)
            ),
        )

    async def _see_known(
        self, side: Side, hand_off: HandOff, what: str, kind: str
    ) -> None:
        await self.see(
            side,
            f"{what} {kind} of {hand_off.name}",
            lambda e: (
                e.transfer == hand_off.transfer_id and e.what == what and e.kind == kind
            ),
        )
