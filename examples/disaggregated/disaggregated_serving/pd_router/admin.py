# SPDX-License-Identifier: Apache-2.0
"""What operators see and change: status, and workers at run time."""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from .breaker import BreakerState
from .config import (
    Address,
    ConfigError,
    Mode,
    Role,
    WorkerSpec,
    check_decode_channels,
    check_workers,
    make_side_channel,
)
from .errors import RejectedRequest
from .router import Router
from .workers import Worker

ADMIN_HEADER = "x-admin-key"

_CHANNEL_KEYS = {
    "engine_id": "engine_id",
    "kv_host": "kv_host",
    "side_channel_port": "port",
    "tp_size": "tp_size",
    "pp_size": "pp_size",
}


def status(router: Router) -> dict[str, Any]:
    """The router's state: workers and counts, nothing of any request."""
    return {
        "mode": str(router.config.mode),
        "model": router.config.model,
        "adapters": list(router.config.adapters),
        "ready": router.workers.ready() and not router.in_flight.draining,
        "draining": router.in_flight.draining,
        "in_flight": router.in_flight.count,
        "workers": [_describe(worker) for worker in router.workers],
    }


def broken(router: Router) -> dict[str, str]:
    """The workers whose circuit breakers are not closed, and what they are."""
    return {
        str(worker): str(worker.breaker.state)
        for worker in router.workers
        if worker.breaker.state is not BreakerState.CLOSED
    }


def authorize(router: Router, headers: Mapping[str, str]) -> None:
    """Let operators in.

    Raises:
        RejectedRequest: 403 without a configured key, 401 for a wrong one.
    """
    key = router.config.admin_key
    if not key:
        raise RejectedRequest(
            "changing workers is off; start the router with --admin-key",
            status=403,
            kind="PermissionError",
        )
    given = headers.get(ADMIN_HEADER, "")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise RejectedRequest(
            "X-Admin-Key is missing or wrong", status=401, kind="AuthenticationError"
        )


async def add_worker(router: Router, raw: bytes) -> dict[str, Any]:
    """Make a worker known and check its health at once.

    Raises:
        RejectedRequest: the description is wrong (400) or known already (409).
    """
    fields = _object(raw)
    role, address = _role_and_address(fields)
    allowed = {"role", "address"}
    channel = None
    is_source = role is Role.PREFILL and router.config.mode is Mode.PUSH
    allowed |= _CHANNEL_KEYS.keys() if is_source else {"side_channel"}
    unknown = sorted(fields.keys() - allowed)
    if unknown:
        raise RejectedRequest(
            f"unknown field(s) {', '.join(unknown)}; "
            f"expected {', '.join(sorted(allowed))}"
        )
    try:
        report_address = None
        if is_source:
            given = {to: fields.get(key) for key, to in _CHANNEL_KEYS.items()}
            channel = make_side_channel(address, **given)
            report_address = channel.address
        elif fields.get("side_channel") is not None:
            report_address = Address.parse(str(fields["side_channel"]), "side_channel")
        spec = WorkerSpec(role, address, channel, report_address)
        if router.multiturn is not None:
            check_decode_channels([spec])
    except ConfigError as error:
        raise RejectedRequest(str(error)) from error
    try:
        known = [worker.spec for worker in router.workers]
        check_workers([*known, spec], need_both=False)
    except ConfigError as error:
        raise RejectedRequest(str(error), status=409, kind="ConflictError") from error
    worker = router.workers.add(spec)
    await router.health.check(worker)
    return _describe(worker)


def remove_worker(router: Router, query: Mapping[str, str]) -> dict[str, Any]:
    """Forget a worker; its running legs go on.

    Raises:
        RejectedRequest: the query is wrong (400) or names nobody (404).
    """
    role, address = _role_and_address(query)
    try:
        worker = router.workers.remove(role, address)
    except KeyError as error:
        raise RejectedRequest(
            f"there is no {role} worker {address}", status=404, kind="NotFoundError"
        ) from error
    return _describe(worker)


def _describe(worker: Worker) -> dict[str, Any]:
    channel = worker.spec.side_channel
    described: dict[str, Any] = {
        "role": str(worker.role),
        "address": str(worker.address),
        "healthy": worker.healthy,
        "outstanding": worker.outstanding,
        "load": worker.load,
        "picked": worker.picked,
        "last_error": worker.last_error,
        "breaker": {
            "state": str(worker.breaker.state),
            "failures": worker.breaker.failures,
            "opened": worker.breaker.opened,
            "retry_seconds": round(worker.breaker.retry_in, 3),
        },
    }
    if channel is not None:
        described["side_channel"] = {
            "host": channel.host,
            "port": channel.port,
            "engine_id": channel.engine_id,
            "tp_size": channel.tp_size,
            "pp_size": channel.pp_size,
        }
    elif worker.spec.report_address is not None:
        described["side_channel"] = str(worker.spec.report_address)
    return described


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise RejectedRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RejectedRequest("the body is not a JSON object")
    return value


def _role_and_address(fields: Mapping[str, Any]) -> tuple[Role, Address]:
    try:
        role = Role(fields.get("role", ""))
    except ValueError as error:
        raise RejectedRequest(
            f"role is {fields.get('role')!r}; expected prefill or decode", param="role"
        ) from error
    try:
        return role, Address.parse_worker(str(fields.get("address", "")), "address")
    except ConfigError as error:
        raise RejectedRequest(str(error), param="address") from error
