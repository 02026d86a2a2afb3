# SPDX-License-Identifier: Apache-2.0
"""What an engine tells over its side channel, asked without loading an engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pd_router.config import Address
from pd_router.side_channel import SideChannelClient, UnansweredError
from verify_result import Unchecked


class _GetIntegrity(msgspec.Struct, frozen=True, array_like=True, tag="get_integrity"):
    pass


class _GetHandoffs(msgspec.Struct, frozen=True, array_like=True, tag="get_handoffs"):
    pass


async def integrity(client: SideChannelClient, address: Address) -> dict[str, Any]:
    """Free and total blocks, pins, tables, counters and ranks.

    Raises:
        Unchecked: no usable answer.
    """
    document: dict[str, Any] = await _ask(client, address, _GetIntegrity())
    return document


async def handoffs(client: SideChannelClient, address: Address) -> list[dict[str, Any]]:
    """The latest 1,024 finished hand-offs, oldest first; raises as above."""
    records: list[dict[str, Any]] = await _ask(client, address, _GetHandoffs())
    return records


async def _ask(client: SideChannelClient, address: Address, question: Any) -> Any:
    try:
        return json.loads(await client.report(address, question))
    except UnansweredError as error:
        raise Unchecked(
            f"the side channel {address} gave no report ({error}). Its port must be "
            "open to this machine"
        ) from error
