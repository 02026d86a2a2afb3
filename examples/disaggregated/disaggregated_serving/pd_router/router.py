# SPDX-License-Identifier: Apache-2.0
"""One router: its parts, and what happens to a request that reaches it."""

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from .attempts import Call
from .balance import Scorer
from .balance import scorer as make_scorer
from .choices import ChoiceLog
from .config import Mode, Role, RouterConfig
from .conversation_api import take_key
from .conversation_metrics import ConversationCollector
from .dispatch import Dispatcher, LocalDispatcher, Planner
from .errors import (
    BackendRejection,
    Cause,
    HandoffError,
    RejectedRequest,
    Reply,
    RouterError,
    is_refusal,
)
from .health import HealthMonitor
from .leg_runner import Legs
from .legs import Backend, LegError, forwarded
from .many import relay_many
from .metrics import Metrics
from .multiturn import Multiturn
from .prompts import Merger, split
from .pull import PullDispatcher
from .push import PushDispatcher
from .relay import ClientConnection, InFlight, RelayResponse, relay_one
from .rewrite import COMPLETIONS_PATH, KV_PARAMS, Body, needs_local_prefill
from .side_channel import SideChannelClient, Token
from .workers import Registry

DISPATCHERS: Mapping[Mode, type[Dispatcher]] = {
    Mode.PUSH: PushDispatcher,
    Mode.PULL: PullDispatcher,
}

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Router:
    """Everything of one router except the HTTP server around it.

    Raises:
        ConfigError: the token file holds no token.
    """

    def __init__(self, config: RouterConfig, scorer: Scorer | None = None) -> None:
        self.config = config
        routing = config.routing
        self.workers = Registry(
            scorer or make_scorer(routing.balance),
            routing.breaker,
            routing.balance.memory_tokens,
        )
        for spec in config.workers:
            self.workers.add(spec)
        self.metrics = Metrics(config.mode, self.workers)
        self.in_flight = InFlight()
        self._backend = Backend(config.timeouts)
        self.health = HealthMonitor(
            self.workers,
            self._backend,
            config.health_interval,
            config.timeouts.health,
        )
        token_file = config.side_channel_token_file
        self._side_channels = SideChannelClient(
            None if token_file is None else Token.load(token_file)
        )
        self.multiturn: Multiturn | None = None
        if config.conversations is not None:
            self.multiturn = Multiturn(
                config.conversations, self.workers, self._side_channels
            )
            self.metrics.registry.register(
                ConversationCollector(config.mode, self.multiturn)
            )
        legs = Legs(
            config, self.workers, self._backend, self.metrics, self._side_channels
        )
        planner: Planner | None = self.multiturn.plan if self.multiturn else None
        self._choices: ChoiceLog | None = None
        if config.choice_log is not None:
            self._choices = ChoiceLog(config.choice_log, config.mode, self.workers)
            planner = self._choices.planner(planner)
        self._dispatcher = DISPATCHERS[config.mode](legs, planner)
        self._local = LocalDispatcher(legs)
        self._monitor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the client and begin to check the workers' health."""
        await self._backend.start()
        self._monitor = asyncio.create_task(self.health.run())

    async def stop(self) -> None:
        """Stop checking and close the client."""
        if self._monitor:
            self._monitor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._monitor
        await self._backend.stop()
        if self.multiturn:
            await self.multiturn.stop()
        self._side_channels.close()
        if self._choices:
            self._choices.close()

    def respond(
        self, path: str, raw: bytes, headers: Mapping[str, str]
    ) -> RelayResponse:
        """The response to a generation request."""
        request_id = self.request_id(headers)

        async def serve(client: ClientConnection) -> None:
            await self._serve(path, raw, headers, request_id, client)

        return RelayResponse(
            serve,
            path=path,
            request_id=request_id,
            in_flight=self.in_flight,
            metrics=self.metrics,
            patience=self.config.timeouts.idle,
        )

    async def models(self, headers: Mapping[str, str]) -> Reply:
        """What an engine says about the models it serves.

        Raises:
            RouterError: no engine can say.
        """
        failure: RouterError = HandoffError(
            Cause.NO_WORKER, "no healthy worker is available"
        )
        limit = self.config.timeouts.health
        for role in (Role.DECODE, Role.PREFILL):
            for worker in self.workers.healthy(role):
                try:
                    reply = await self._backend.get(
                        worker, "/v1/models", limit, forwarded(headers)
                    )
                except LegError as error:
                    failure = HandoffError(Cause.NO_WORKER, str(error))
                    continue
                if reply.status == 200 or is_refusal(reply.status):
                    return reply
                failure = BackendRejection(reply)
        raise failure

    @staticmethod
    def request_id(headers: Mapping[str, str]) -> str:
        """The client's request id if it is fit for a header, else a new one."""
        given = headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    async def _serve(
        self,
        path: str,
        raw: bytes,
        headers: Mapping[str, str],
        request_id: str,
        client: ClientConnection,
    ) -> None:
        if self.in_flight.draining:
            raise HandoffError(Cause.SHUTDOWN, "the router is shutting down")
        body = self._checked(raw)
        conversation = (
            take_key(self.multiturn, body, headers) if self.multiturn else None
        )
        dispatcher: Dispatcher = self._dispatcher
        parts = [body]
        if needs_local_prefill(path, body):
            dispatcher = self._local
        elif path == COMPLETIONS_PATH:
            parts = split(body)
        if len(parts) > self.config.max_prompts:
            raise RejectedRequest(
                f"prompt holds {len(parts)} prompts; at most "
                f"{self.config.max_prompts} are allowed in one request",
                param="prompt",
            )
        passed_on = forwarded(headers)
        if len(parts) == 1:
            call = Call(path, parts[0], request_id, passed_on, conversation)
            await relay_one(dispatcher, call, client)
        else:
            calls = [Call(path, part, request_id, passed_on) for part in parts]
            merger = Merger(body, f"cmpl-{request_id}")
            await relay_many(
                dispatcher, calls, merger, client, self.config.split_concurrency
            )

    def _checked(self, raw: bytes) -> Body:
        try:
            body: Any = json.loads(raw)
        except ValueError as error:
            raise RejectedRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise RejectedRequest("the body is not a JSON object")
        if body.pop(KV_PARAMS, None) is not None:
            raise RejectedRequest(
                f"{KV_PARAMS} is set by the router and not accepted from clients; "
                "leave it out",
                param=KV_PARAMS,
            )
        model = self.config.model
        if model is not None:
            if body.get("model") is None:
                body["model"] = model
            elif body["model"] not in (model, *self.config.adapters):
                served = ", ".join(map(repr, (model, *self.config.adapters)))
                raise RejectedRequest(
                    f"The model {body['model']!r} does not exist; "
                    f"this router serves {served}.",
                    status=404,
                    kind="NotFoundError",
                    param="model",
                )
        return body
