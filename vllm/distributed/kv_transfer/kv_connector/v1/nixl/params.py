# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what a router says to an engine, and back.

The dict comes from a client's request body, so nothing in it is trusted: it is
parsed once into one of two typed values or refused with a reason.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .ids import KEPT_PREFIX, EngineId, Mode, RequestId, TransferId

MAX_ID_CHARS = 256
MAX_RECEIVERS = 4096
MAX_RANKS = 4096
MAX_GROUPS = 64
MAX_BLOCKS = 1 << 22
"""Block ids of one group: as many as a message may hold."""

MAX_BLOCK_ID = 2**31 - 1


class ParamsError(ValueError):
    """``kv_transfer_params`` that cannot be used; the text says which field."""


@dataclass(frozen=True)
class PrefillParams:
    """The prefill leg: compute the prompt and hand its KV off.

    Attributes:
        transfer_id: the router's name for this dispatch, if it gave one.
        num_receivers: how many decode requests will ask for the KV, if known.
        earlier: the turn of the conversation whose KV can be read back, if any.
        problem: why the one that is named cannot be used, if so.
    """

    transfer_id: TransferId | None
    num_receivers: int | None
    earlier: "EarlierTurn | None" = None
    problem: str = ""


@dataclass(frozen=True)
class EarlierTurn:
    """What a decode engine keeps of an earlier turn, and where its side channel is."""

    transfer_id: TransferId
    host: str
    port: int


@dataclass(frozen=True)
class PrefillAddress:
    """Where an engine's side channel listens and how many ranks it has."""

    host: str
    port: int
    engine_id: EngineId | None = None
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True)
class Whereabouts:
    """Where the prefill engine has said that the prompt's KV lies.

    ``blocks`` holds, per KV cache group, the block ids from the start of the prompt.
    A client has relayed it, so it is a hint and no more.
    """

    generation: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DecodeParams:
    """The decode leg: obtain the prompt's KV from ``address``.

    Attributes:
        transfer_id: the router's name for this dispatch, if it gave one.
        remote_request_id: the prefill engine's own id, where the router relays it.
        address: the prefill engine.
        retain: whether the KV may be kept for a later turn.
        releases: the turn whose KV is not needed once this one has ended well.
        whereabouts: where the KV is said to lie, if the router relays that.
    """

    transfer_id: TransferId | None
    remote_request_id: RequestId | None
    address: PrefillAddress
    retain: bool = True
    releases: TransferId | None = None
    whereabouts: Whereabouts | None = None


def _error(key: str, value: object, expected: str) -> ParamsError:
    return ParamsError(
        f"kv_transfer_params[{key!r}] is {_shown(value)}, expected {expected}"
    )


def _shown(value: object) -> str:
    """A short text for any value, made without looking at all of it."""
    match value:
        case None | bool() | float():
            return repr(value)
        case int():
            bits = value.bit_length()
            return repr(value) if bits <= 64 else f"an integer of {bits} bits"
        case str():
            return repr(value) if len(value) <= 64 else repr(value[:61]) + "..."
    return f"of type {type(value).__name__}"


def _flag(params: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = params.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _error(key, value, "true or false")
    return value


def _optional_id(params: Mapping[str, Any], key: str) -> str | None:
    value = params.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise _error(key, value, f"a string of 1 to {MAX_ID_CHARS} characters")
    if not value.isprintable():
        # Lone surrogates, which JSON can spell, could not be sent to a peer.
        raise _error(key, value, "printable characters")
    return value


def _bounded(params: Mapping[str, Any], key: str, limit: int) -> int | None:
    value = params.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
        raise _error(key, value, f"an integer from 1 to {limit}")
    return value


def _transfer_id(
    params: Mapping[str, Any], key: str = "transfer_id"
) -> TransferId | None:
    value = _name(params, key)
    return None if value is None else TransferId(value)


def _name(params: Mapping[str, Any], key: str) -> str | None:
    value = _optional_id(params, key)
    if value is not None and value.startswith(KEPT_PREFIX):
        raise _error(key, value, f"a name that does not begin with {KEPT_PREFIX!r}")
    return value


def parse_params(params: object) -> PrefillParams | DecodeParams | None:
    """Read the params of one request.

    Returns:
        ``None`` where they ask for no hand-off.

    Raises:
        ParamsError: the dict asks for a hand-off that cannot be done.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise ParamsError(
            f"kv_transfer_params is a {type(params).__name__}, expected an object"
        )
    prefill = _flag(params, "do_remote_decode")
    decode = _flag(params, "do_remote_prefill")
    if prefill and decode:
        raise ParamsError(
            "kv_transfer_params sets do_remote_decode and do_remote_prefill both; "
            "a request is one leg of a hand-off, not both"
        )
    if prefill:
        earlier, problem = None, ""
        try:
            earlier = _parse_earlier(params)
        except ParamsError as error:
            problem = str(error)
        return PrefillParams(
            transfer_id=_transfer_id(params),
            num_receivers=_bounded(params, "num_receivers", MAX_RECEIVERS),
            earlier=earlier,
            problem=problem,
        )
    if decode:
        return _parse_decode(params)
    return None


def _parse_earlier(params: Mapping[str, Any]) -> EarlierTurn | None:
    transfer_id = _transfer_id(params, "retained_transfer_id")
    if transfer_id is None:
        # Routers that copy only the fields they know do not know that one.
        told = ("remote_request_id", "remote_host", "remote_port")
        if any(params.get(key) is None for key in told):
            return None
        transfer_id = _transfer_id(params, "remote_request_id")
        assert transfer_id is not None
    host, port = _address(params)
    return EarlierTurn(transfer_id, host, port)


def _address(params: Mapping[str, Any]) -> tuple[str, int]:
    host = _optional_id(params, "remote_host")
    port = _bounded(params, "remote_port", 65535)
    if host is None or port is None:
        key = "remote_host" if host is None else "remote_port"
        raise _error(key, None, "the address of the other engine's side channel")
    return host, port


def _parse_decode(params: Mapping[str, Any]) -> DecodeParams:
    host, port = _address(params)
    engine_id = _optional_id(params, "remote_engine_id")
    request_id = _name(params, "remote_request_id")
    return DecodeParams(
        transfer_id=_transfer_id(params),
        remote_request_id=None if request_id is None else RequestId(request_id),
        address=PrefillAddress(
            host=host,
            port=port,
            engine_id=None if engine_id is None else EngineId(engine_id),
            tp_size=_bounded(params, "tp_size", MAX_RANKS) or 1,
            pp_size=_bounded(params, "pp_size", MAX_RANKS) or 1,
        ),
        retain=_flag(params, "retain", default=True),
        releases=_transfer_id(params, "release_transfer_id"),
        whereabouts=_whereabouts(params),
    )


def _whereabouts(params: Mapping[str, Any]) -> Whereabouts | None:
    generation, groups = params.get("remote_generation"), params.get("remote_block_ids")
    if generation is None or groups is None:
        return None
    if not isinstance(generation, str) or not re.fullmatch(
        r"[0-7]?[0-9a-f]{1,15}", generation
    ):
        raise _error("remote_generation", generation, "what the prefill engine gave")
    if not isinstance(groups, list) or not 0 < len(groups) <= MAX_GROUPS:
        raise _error("remote_block_ids", groups, f"1 to {MAX_GROUPS} lists of integers")
    for group in groups:
        if not isinstance(group, list) or len(group) > MAX_BLOCKS:
            expected = f"lists of up to {MAX_BLOCKS} integers"
            raise _error("remote_block_ids", group, expected)
        wrong = [block for block in group if type(block) is not int]
        if not wrong and group:
            ends = min(group), max(group)
            wrong = [end for end in ends if not 0 <= end <= MAX_BLOCK_ID]
        if wrong:
            raise _error("remote_block_ids", wrong[0], f"ids from 0 to {MAX_BLOCK_ID}")
    return Whereabouts(int(generation, 16), tuple(tuple(group) for group in groups))


def prefill_result(
    *,
    mode: Mode,
    transfer_id: TransferId,
    request_id: RequestId,
    address: PrefillAddress,
    block_ids: tuple[list[int], ...],
    num_tokens: int,
    generation: int | None = None,
) -> dict[str, Any]:
    """What a finished prefill leg returns, for the router to relay to D.

    With the ``generation`` that was computed into ``block_ids`` D begins to read them
    while it asks for a lease; without, it waits for the lease, which names the blocks.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_generation": None if generation is None else f"{generation:x}",
        "remote_engine_id": address.engine_id,
        "remote_request_id": request_id,
        "remote_host": address.host,
        "remote_port": address.port,
        "tp_size": address.tp_size,
        "dcp_size": 1,
        "pp_size": address.pp_size,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": mode.value,
    }


def retention_result(
    *,
    mode: Mode,
    transfer_id: TransferId,
    address: PrefillAddress,
    num_groups: int,
    num_tokens: int,
    expires_at: float,
) -> dict[str, Any]:
    """What a finished decode leg returns, for the prefill leg of the next turn.

    ``expires_at`` is in seconds since the epoch. No block id is in it: the prefill
    engine asks for the blocks, under a name that the client does not learn. There is
    an empty list per KV cache group, because routers take an answer without lists for
    one that keeps nothing; they relay ``remote_request_id`` as the turn's name.
    """
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "retained_transfer_id": transfer_id,
        "remote_block_ids": [[] for _ in range(num_groups)],
        "remote_engine_id": address.engine_id,
        "remote_request_id": transfer_id,
        "remote_host": address.host,
        "remote_port": address.port,
        "tp_size": address.tp_size,
        "dcp_size": 1,
        "pp_size": address.pp_size,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": expires_at,
        "transfer_mode": mode.value,
    }


def external_id(request_id: str, suffix_appended: bool) -> TransferId:
    """The id by which a request is known outside this engine.

    The engine appends ``-`` and eight hexadecimal digits to what the front end
    named a request, unless told not to; both legs of a router that sends one
    ``X-Request-Id`` to both therefore share what precedes them.
    """
    outside = request_id
    if suffix_appended and len(request_id) > 9 and request_id[-9] == "-":
        outside = request_id[:-9]
    if len(outside) > MAX_ID_CHARS or outside.startswith(KEPT_PREFIX):
        # The client chose it; what stands for it is the same on both sides.
        return TransferId(hashlib.sha256(outside.encode()).hexdigest())
    return TransferId(outside)
