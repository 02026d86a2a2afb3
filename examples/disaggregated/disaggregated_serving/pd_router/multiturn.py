# SPDX-License-Identifier: Apache-2.0
"""Conversations: later turns go on from what a decode engine kept of earlier ones."""

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .attempts import Attempt
from .config import Address, ConversationSettings, Role
from .conversations import Conversations, Kept, Key, Turn
from .errors import Reply
from .plan import Plan
from .rewrite import receivers
from .side_channel import SideChannelClient, UnansweredError
from .workers import Registry, Worker

logger = logging.getLogger("pd_router")

# An engine that is not told lets go by itself, so a flood need not be queued.
MAX_RELEASES_UNDER_WAY = 64

_KEY_BYTES = 16
_MAX_TOKENS = 2**31


class Multiturn:
    """Remembers where conversations are kept and plans their turns by it."""

    def __init__(
        self,
        settings: ConversationSettings,
        workers: Registry,
        side_channels: SideChannelClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = Conversations(settings, clock)
        self._workers = workers
        self._side_channels = side_channels
        # Ids are often guessable; their hashes are of no use without this.
        self._secret = os.urandom(32)
        self._releasing: set[asyncio.Task[bool]] = set()

    def key(self, authorization: str, conversation_id: str) -> Key:
        """Name a conversation of the caller with this ``Authorization`` value.

        Callers without one (an empty value) share a name space.
        """
        digest = hashlib.blake2b(key=self._secret, digest_size=_KEY_BYTES)
        digest.update(hashlib.sha256(authorization.encode()).digest())
        digest.update(conversation_id.encode())
        return Key(digest.digest())

    def plan(self, attempt: Attempt) -> Plan:
        """Plan an attempt at a turn, or at a request outside any conversation."""
        key = attempt.call.conversation
        if key is None:
            return _SinglePlan()
        plan = _TurnPlan(self, attempt, self.table.begin(key))
        self.flush()
        return plan

    async def delete(self, key: Key) -> bool | None:
        """End a conversation; ``None`` if it is unknown.

        True if its decode engine has been told to let go of it. A turn under way
        goes on and leaves nothing.
        """
        self.refresh()
        if not self.table.delete(key):
            return None
        tasks = self.flush()
        if not tasks:
            return False
        await asyncio.wait(tasks)
        return all(task.result() for task in tasks)

    def refresh(self) -> None:
        """Forget what has not been used for too long."""
        self.table.sweep()
        self.flush()

    def flush(self) -> list[asyncio.Task[bool]]:
        """Begin to tell engines what to let go of, as far as they can be told."""
        tasks = []
        for kept in self.table.take_releases():
            address = self.side_channel(kept.worker)
            if address is None or len(self._releasing) >= MAX_RELEASES_UNDER_WAY:
                self.table.totals.releases["skipped"] += 1
                continue
            task = asyncio.create_task(self._release(address, kept))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)
            tasks.append(task)
        return tasks

    def side_channel(self, worker: Address) -> Address | None:
        """Where a decode worker's side channel is, if the worker is healthy."""
        known = self._workers.get(Role.DECODE, worker)
        return known.spec.report_address if known and known.healthy else None

    async def stop(self) -> None:
        """Abandon the releases under way."""
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def _release(self, address: Address, kept: Kept) -> bool:
        try:
            await self._side_channels.release(address, kept.transfer_id)
        except UnansweredError as error:
            self.table.totals.releases["failed"] += 1
            logger.warning(
                "decode %s was not told to let go of transfer=%s at its side channel "
                "%s: %s",
                kept.worker,
                kept.transfer_id,
                address,
                error,
            )
            return False
        self.table.totals.releases["ok"] += 1
        return True


class _SinglePlan(Plan):
    """Nobody will continue this request, so nothing of it is kept."""

    def decode_params(self, worker: Worker) -> Mapping[str, Any]:
        return {"retain": False}


class _TurnPlan(Plan):
    """One attempt at one turn of a conversation."""

    def __init__(self, multiturn: Multiturn, attempt: Attempt, turn: Turn) -> None:
        self._multiturn = multiturn
        self._table = multiturn.table
        self._attempt = attempt
        self._turn = turn
        # A second decode leg may run beside the first one.
        self._kept: dict[Address, Kept] = {}
        self._told = False
        self._prompt_tokens: int | None = None
        self._moved: str | None = None

    def prefer(self, candidates: Sequence[Worker]) -> Worker | None:
        base = self._turn.base
        if base is None:
            return None
        own = next((w for w in candidates if w.address == base.worker), None)
        if own is None:
            self._moved = "unavailable"
            return None
        least = min(worker.outstanding for worker in candidates)
        if own.outstanding - least > self._table.settings.sticky_margin:
            self._moved = "overloaded"
            return None
        return own

    def prefill_params(self) -> Mapping[str, Any]:
        base = self._turn.base
        if base is None:
            return {}
        address = self._multiturn.side_channel(base.worker)
        if address is None:
            return {}
        self._told = True
        logger.info(
            "transfer=%s continues transfer=%s kept by decode %s",
            self._attempt.transfer_id,
            base.transfer_id,
            base.worker,
        )
        return {
            "retained_transfer_id": base.transfer_id,
            "remote_host": address.host,
            "remote_port": address.port,
        }

    def prefilled(self, reply: Reply) -> None:
        usage = _usage(reply)
        self._prompt_tokens = _count(usage.get("prompt_tokens"))
        for kept in self._kept.values():
            kept.prompt_tokens = self._prompt_tokens
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        saved = _count(cached)
        if self._told and saved is not None and self._prompt_tokens is not None:
            self._table.totals.prompt_tokens += self._prompt_tokens
            self._table.totals.saved_tokens += min(saved, self._prompt_tokens)

    def decode_params(self, worker: Worker) -> Mapping[str, Any]:
        # Several answers to one prompt leave no single history to go on from.
        if receivers(self._attempt.call.body) > 1 or not worker.spec.report_address:
            return {"retain": False}
        self._kept[worker.address] = Kept(
            self._attempt.transfer_id,
            worker.address,
            prompt_tokens=self._prompt_tokens,
        )
        base = self._turn.base
        if base is not None and base.worker == worker.address:
            released = self._table.promise_release(self._turn)
            if released is not None:
                return {"release_transfer_id": released}
        return {}

    def answered(self) -> None:
        totals = self._table.totals
        totals.turns["hit" if self._told else "miss"] += 1
        base, decode = self._turn.base, self._attempt.decode
        if self._moved and base and decode and base.worker != decode.address:
            totals.moved[self._moved] += 1

    def finished(self, reply: Reply | None) -> None:
        decode = self._attempt.decode
        kept = None if decode is None else self._kept.get(decode.address)
        if kept is None:
            return
        if reply is not None:
            usage = _usage(reply)
            kept.answer_tokens = _count(usage.get("completion_tokens"))
            if kept.prompt_tokens is None:
                kept.prompt_tokens = _count(usage.get("prompt_tokens"))
        base = self._turn.base
        if base is not None and base.worker != kept.worker:
            # Only the engine that has been asked to lets go by itself.
            self._table.withdraw_promise(self._turn)
        self._table.finish(self._turn, kept)
        self._multiturn.flush()

    def end(self) -> None:
        self._table.end(self._turn)
        self._multiturn.flush()


def _usage(reply: Reply) -> Mapping[str, Any]:
    value = reply.json()
    usage = value.get("usage") if isinstance(value, dict) else None
    return usage if isinstance(usage, dict) else {}


def _count(value: object) -> int | None:
    """A number of tokens as an engine reports it; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MAX_TOKENS else None
