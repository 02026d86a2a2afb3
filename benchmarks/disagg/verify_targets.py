# SPDX-License-Identifier: Apache-2.0
"""Which servers are verified, as given or as a router tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from pd_router.config import Address, ConfigError
from pd_router.side_channel import Token
from verify_engines import Engine
from verify_http import AskError, Server, get_object

_TIE_MARGINS = {"torch.float32": 0.01, "torch.float64": 0.01}
_OTHER_TIE_MARGIN = 0.25


@dataclass(frozen=True)
class Settings:
    """What is verified, and how.

    Attributes:
        single: an engine without hand-off whose answers are the reference; without
            it the first decode engine computes them itself.
        margin: how far rounding may move a logprob, by the model's type if ``None``.
        strict: a near tie is a failure.
        long_tokens: tokens of the longest prompts.
        settle_seconds: within which nothing may be held any more.
        drill_seconds: the same after a fault.
    """

    prefill: tuple[Engine, ...]
    decode: tuple[Engine, ...]
    router: Server | None = None
    single: Server | None = None
    model: str | None = None
    token: Token | None = None
    seed: int = 0
    margin: float | None = None
    strict: bool = False
    long_tokens: int = 2048
    at_once: int = 8
    request_seconds: float = 120.0
    settle_seconds: float = 15.0
    drill: bool = False
    drill_seconds: float = 60.0
    logs: tuple[Path, ...] = field(default=())
    expect_backend: str | None = None
    expect_rails: int | None = None


def margin_of(dtype: str) -> float:
    """How far rounding may move a logprob of a model of this type."""
    return _TIE_MARGINS.get(dtype, _OTHER_TIE_MARGIN)


def parse_server(text: str, flag: str) -> Server:
    """Read ``http://HOST:PORT``, with ``@RANK`` behind it for a data-parallel rank.

    Raises:
        ConfigError: the text is not such a URL.
    """
    address = Address.parse_worker(text, flag)
    return Server(Address(address.host, address.port).url, address.dp_rank)


def parse_engine(text: str, role: str) -> Engine:
    """Read ``URL[,HOST:PORT]``: where an engine serves, and its side channel.

    Raises:
        ConfigError: the text is not that.
    """
    url, comma, channel = text.partition(",")
    flag = f"--{role}"
    side_channel = Address.parse(channel, flag) if comma else None
    return Engine(role, parse_server(url, flag), side_channel)


async def discovered(
    session: aiohttp.ClientSession, router: Server
) -> tuple[tuple[Engine, ...], tuple[Engine, ...]]:
    """Prefill and decode engines behind a router of this project.

    Raises:
        AskError: it does not answer, or tells no workers.
    """
    url = f"{router.url}/status"
    status = await get_object(session, url)
    try:
        engines = [_worker(worker) for worker in status["workers"]]
    except (KeyError, TypeError, ConfigError) as error:
        raise AskError(
            f"{url} names no workers ({error!r}): give --prefill and --decode"
        ) from error
    prefill = tuple(e for e in engines if e.role == "prefill")
    decode = tuple(e for e in engines if e.role == "decode")
    if not prefill or not decode:
        raise AskError(
            f"{url} names no engine of one role: give --prefill and --decode"
        )
    return prefill, decode


def _worker(described: dict[str, Any]) -> Engine:
    channel = described.get("side_channel")
    address: Address | None = None
    if isinstance(channel, dict):
        address = Address(channel["host"], channel["port"])
    elif channel is not None:
        address = Address.parse(channel, "/status")
    server = parse_server(described["address"], "/status")
    return Engine(described["role"], server, address)
