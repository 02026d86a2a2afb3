# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a request, and what the client is told."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .workers import Worker

RETRY_AFTER_SECONDS = 1


class Cause(StrEnum):
    """Why a request failed; a label in metrics and a field in error bodies."""

    PREFILL_CONNECT = "prefill_connect"
    PREFILL_STATUS = "prefill_status"
    PREFILL_BROKEN = "prefill_broken"
    PREFILL_TIMEOUT = "prefill_timeout"
    DECODE_CONNECT = "decode_connect"
    DECODE_STATUS = "decode_status"
    DECODE_ERROR_EVENT = "decode_error_event"
    DECODE_BROKEN = "decode_broken"
    DECODE_TIMEOUT = "decode_timeout"
    NO_WORKER = "no_worker"
    CIRCUIT_OPEN = "circuit_open"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"

    def json(self) -> Any:
        """The body as JSON, or ``None`` if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def is_refusal(status: int) -> bool:
    """Whether a status says that the request is at fault, not the hand-off."""
    return 400 <= status < 500 or status == 501


class RouterError(Exception):
    """A failure with the answer that the client gets for it."""

    outcome = "failed"

    def reply(self) -> Reply:
        """The answer if nothing has been sent to the client yet."""
        raise NotImplementedError

    def event(self) -> bytes:
        """The error event if the client's stream has begun."""
        return b"data: " + self.reply().body + b"\n\n"


class RejectedRequest(RouterError):
    """The router itself refuses the request."""

    outcome = "rejected"

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def reply(self) -> Reply:
        """An error in the form of the OpenAI API."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return Reply(self.status, json.dumps({"error": error}).encode())


class BackendRejection(RouterError):
    """An engine's own error answer, which the client gets unchanged."""

    def __init__(self, answer: Reply) -> None:
        super().__init__(f"an engine answered {answer.status}")
        self._answer = answer
        self.outcome = "rejected" if is_refusal(answer.status) else "backend_failed"

    def reply(self) -> Reply:
        """The engine's status, body and content type."""
        return self._answer


class HandoffError(RouterError):
    """The request failed between the engines; sending it again may work.

    ``detail`` is what the engines say about it, where they were asked.
    """

    def __init__(
        self,
        cause: Cause,
        message: str,
        *,
        transfer_id: str | None = None,
        timeout: bool = False,
        retry_after: str | None = None,
        worker: Worker | None = None,
        worker_status: int | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.worker = worker
        self.worker_status = worker_status
        self.detail = detail
        self.transfer_id = transfer_id
        self.status = 504 if timeout else 503
        self.asked_pause = retry_after
        self.retry_after = retry_after or str(RETRY_AFTER_SECONDS)
        self.outcome = "timeout" if timeout else "handoff_failed"

    def reply(self) -> Reply:
        """A retryable 503, or 504 after a wait that took too long."""
        kinds = {
            Cause.NO_WORKER: "no_worker",
            Cause.CIRCUIT_OPEN: "no_worker",
            Cause.SHUTDOWN: "shutting_down",
        }
        error = {
            "message": str(self),
            "type": kinds.get(self.cause, "kv_handoff_failed"),
            "code": self.status,
            "retryable": True,
            "transfer_id": self.transfer_id,
            "cause": str(self.cause),
        }
        if self.detail is not None:
            error["detail"] = self.detail
        headers = {"Retry-After": self.retry_after}
        if self.cause is Cause.SHUTDOWN:
            headers["Connection"] = "close"
        return Reply(self.status, json.dumps({"error": error}).encode(), headers)
