# SPDX-License-Identifier: Apache-2.0
"""How clients name conversations, look at them and end them."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from .conversations import Conversation, Conversations, Key
from .errors import RejectedRequest
from .multiturn import Multiturn

ID_FIELD = "conversation_id"
ID_HEADER = "x-conversation-id"
MAX_ID_CHARS = 256
MAX_LISTED = 1000

_DEFAULT_LISTED = 100
_ID = re.compile(rf"[!-~]{{1,{MAX_ID_CHARS}}}")
_LIMIT = re.compile(r"[0-9]{1,4}")


def take_key(
    multiturn: Multiturn, body: dict[str, Any], headers: Mapping[str, str]
) -> Key | None:
    """The conversation that a request belongs to, whose id leaves the body.

    Raises:
        RejectedRequest: the id is not one, or body and header differ.
    """
    in_body = body.pop(ID_FIELD, None)
    in_header = headers.get(ID_HEADER)
    given = in_header if in_body is None else in_body
    if given is None:
        return None
    if in_header is not None and in_header != given:
        raise RejectedRequest(
            f"{ID_FIELD} and X-Conversation-Id name two conversations; give one",
            param=ID_FIELD,
        )
    return _key(multiturn, given, headers)


def describe(table: Conversations, limit: int) -> dict[str, Any]:
    """What is remembered: counts, ages and places, the one used last first."""
    entries = list(table)
    longest = table.idle_seconds(entries[-1]) if entries else None
    return {
        "conversations": len(entries),
        "max_conversations": table.settings.max_entries,
        "ttl_seconds": table.settings.ttl,
        "turns_under_way": table.turns_under_way,
        "longest_idle_seconds": longest,
        "by_decode": Counter(str(entry.kept.worker) for entry in entries),
        "listed": [_describe(table, entry) for entry in entries[:limit]],
    }


def add_routes(app: FastAPI, multiturn: Multiturn) -> None:
    """Serve the state of conversations, and their end."""

    @app.get("/conversations")
    async def listed(request: Request) -> Response:
        limit = request.query_params.get("limit", str(_DEFAULT_LISTED))
        if not _LIMIT.fullmatch(limit) or int(limit) > MAX_LISTED:
            raise RejectedRequest(
                f"limit is {limit[:MAX_ID_CHARS]!r}; "
                f"expected a whole number from 0 to {MAX_LISTED}",
                param="limit",
            )
        multiturn.refresh()
        return JSONResponse(describe(multiturn.table, int(limit)))

    @app.delete("/conversations/{conversation_id:path}")
    async def ended(request: Request) -> Response:
        given = request.path_params[ID_FIELD]
        released = await multiturn.delete(_key(multiturn, given, request.headers))
        if released is None:
            raise RejectedRequest(
                "no such conversation of this caller is known",
                status=404,
                kind="NotFoundError",
                param=ID_FIELD,
            )
        return JSONResponse({"ended": True, "released": released})


def _key(multiturn: Multiturn, given: object, headers: Mapping[str, str]) -> Key:
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise RejectedRequest(
            f"{ID_FIELD} must be a string of 1 to {MAX_ID_CHARS} printable ASCII "
            "characters without spaces",
            param=ID_FIELD,
        )
    return multiturn.key(headers.get("authorization", ""), given)


def _describe(table: Conversations, entry: Conversation) -> dict[str, Any]:
    kept = entry.kept
    return {
        "key": entry.key.hex(),
        "decode": str(kept.worker),
        "turns": entry.turns,
        "turns_under_way": kept.users,
        "prompt_tokens": kept.prompt_tokens,
        "answer_tokens": kept.answer_tokens,
        "idle_seconds": table.idle_seconds(entry),
        "age_seconds": table.age_seconds(entry),
    }
