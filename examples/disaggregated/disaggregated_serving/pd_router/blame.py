# SPDX-License-Identifier: Apache-2.0
"""Who has failed with a leg, and what that is worth."""

from collections.abc import Collection

from .config import Role
from .errors import Cause, HandoffError, is_refusal
from .legs import ErrorEventError, Failure, LegError, StatusError

OUT_OF_SERVICE = frozenset({502, 503, 504})
"""Statuses that say of a server, or of a gateway before it, that it cannot now."""

_NOBODY: Collection[Role] = ()
_BOTH = tuple(Role)


def blamed(
    error: LegError | StatusError | ErrorEventError, *, handoff: bool
) -> Collection[Role]:
    """The roles whose workers have failed, by the error of a leg.

    A decode engine whose KV did not come answers as one that is broken itself. So
    where it took part in a hand-off both count: the one at fault fails with every
    partner, the other one only with this.
    """
    worker = error.worker
    sure = worker.role is Role.PREFILL or not handoff
    if isinstance(error, LegError):
        sure |= error.kind is not Failure.TIMEOUT
    else:
        status = (
            error.reply.status
            if isinstance(error, StatusError)
            else error.status or 500
        )
        if is_refusal(status):
            return _NOBODY
        sure |= isinstance(error, StatusError) and status in OUT_OF_SERVICE
    return (worker.role,) if sure else _BOTH


def lost_decode(error: HandoffError) -> bool:
    """Whether a decode leg failed with its engine, not with the hand-off."""
    if error.cause is Cause.DECODE_STATUS:
        return error.worker_status in OUT_OF_SERVICE
    return error.cause in (Cause.DECODE_CONNECT, Cause.DECODE_BROKEN)


def lost_prefill(error: HandoffError) -> bool:
    """Whether a prefill leg failed in a way that says nothing of the request."""
    if error.cause is Cause.PREFILL_STATUS:
        return error.worker_status in OUT_OF_SERVICE
    return error.cause in (Cause.PREFILL_CONNECT, Cause.PREFILL_BROKEN)
