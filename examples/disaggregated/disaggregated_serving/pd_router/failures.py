# SPDX-License-Identifier: Apache-2.0
"""From what an engine did wrong to what the client is told."""

import json

from .errors import (
    BackendRejection,
    Cause,
    HandoffError,
    Reply,
    RouterError,
    is_refusal,
)
from .legs import ErrorEventError, Failure, LegError, StatusError
from .sse import strip_params

_PREFILL_CAUSES = {
    Failure.CONNECT: Cause.PREFILL_CONNECT,
    Failure.BROKEN: Cause.PREFILL_BROKEN,
    Failure.TIMEOUT: Cause.PREFILL_TIMEOUT,
}
_DECODE_CAUSES = {
    Failure.CONNECT: Cause.DECODE_CONNECT,
    Failure.BROKEN: Cause.DECODE_BROKEN,
    Failure.TIMEOUT: Cause.DECODE_TIMEOUT,
}


def prefill_failure(error: LegError | StatusError, transfer_id: str) -> RouterError:
    """What a failed prefill leg means for the request."""
    if isinstance(error, LegError):
        return _broken_leg(error, _PREFILL_CAUSES[error.kind], transfer_id)
    return _error_status(error, Cause.PREFILL_STATUS, transfer_id)


def decode_failure(
    error: LegError | StatusError | ErrorEventError,
    transfer_id: str,
    *,
    handoff: bool = True,
) -> RouterError:
    """What a failed decode leg means for a request whose stream has not begun.

    Without a hand-off the engine's own error is all there is to tell.
    """
    if isinstance(error, LegError):
        return _broken_leg(error, _DECODE_CAUSES[error.kind], transfer_id)
    if isinstance(error, StatusError):
        if not handoff:
            return BackendRejection(_shown(error.reply))
        return _error_status(error, Cause.DECODE_STATUS, transfer_id)
    status = error.status or 500
    if not handoff or is_refusal(status):
        return BackendRejection(Reply(status, json.dumps(error.value).encode()))
    return HandoffError(
        Cause.DECODE_ERROR_EVENT,
        str(error),
        transfer_id=transfer_id,
        worker=error.worker,
        worker_status=status,
    )


def _broken_leg(error: LegError, cause: Cause, transfer_id: str) -> HandoffError:
    return HandoffError(
        cause,
        str(error),
        transfer_id=transfer_id,
        timeout=error.kind is Failure.TIMEOUT,
        worker=error.worker,
    )


def _error_status(error: StatusError, cause: Cause, transfer_id: str) -> RouterError:
    reply = error.reply
    if is_refusal(reply.status):
        return BackendRejection(_shown(reply))
    return HandoffError(
        cause,
        f"{error}: {_message(reply)}",
        transfer_id=transfer_id,
        retry_after=reply.headers.get("Retry-After"),
        worker=error.worker,
        worker_status=reply.status,
    )


def _shown(reply: Reply) -> Reply:
    return Reply(
        reply.status, strip_params(reply.body), reply.headers, reply.content_type
    )


def _message(reply: Reply) -> str:
    value = reply.json()
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return "no reason given"
