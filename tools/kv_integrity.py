# SPDX-License-Identifier: Apache-2.0
"""Ask an engine's side channel what its KV blocks are held by.

    python tools/kv_integrity.py 127.0.0.1:5600             one JSON object
    python tools/kv_integrity.py 127.0.0.1:5600 --wait 10   until all is released
    python tools/kv_integrity.py 127.0.0.1:5600 --handoffs  the latest hand-offs

Without ``--handoffs`` the exit status is 0 only if every block is free and every
table is empty.
"""

import argparse
import json
import sys
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConfigError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
    SideChannelFailure,
    query,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetHandoffs,
    GetIntegrity,
    Report,
)

ANSWER_SECONDS = 5.0
POLL_SECONDS = 0.1


def integrity(
    address: Address, timeout: float = ANSWER_SECONDS, token: Token | None = None
) -> dict[str, Any]:
    """Free and total blocks, pins by state, entries per table, counters.

    Raises:
        SideChannelFailure: the engine does not answer within ``timeout`` seconds.
    """
    document: dict[str, Any] = _report(address, GetIntegrity(), timeout, token)
    return document


def handoffs(
    address: Address, timeout: float = ANSWER_SECONDS, token: Token | None = None
) -> list[dict[str, Any]]:
    """The latest finished hand-offs, oldest first; raises as :func:`integrity`."""
    document: list[dict[str, Any]] = _report(address, GetHandoffs(), timeout, token)
    return document


def released(document: dict[str, Any]) -> bool:
    """Whether nothing is held: all blocks free, all tables empty."""
    return document["free_blocks"] == document["total_blocks"] and not any(
        document["tables"].values()
    )


def wait_released(
    address: Address, seconds: float, token: Token | None = None
) -> dict[str, Any]:
    """Poll until nothing is held or time is up; returns the last answer."""
    deadline = time.monotonic() + seconds
    while True:
        document = integrity(address, token=token)
        if released(document) or time.monotonic() > deadline:
            return document
        time.sleep(POLL_SECONDS)


def _report(address: Address, request: Any, timeout: float, token: Token | None) -> Any:
    reply = query(address, request, timeout, token)
    if not isinstance(reply, Report):
        raise SideChannelFailure(f"unexpected answer {type(reply).__name__}")
    return json.loads(reply.json)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("address", type=_address, metavar="HOST:PORT")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--handoffs", action="store_true")
    parser.add_argument("--token-file", help="the engine's side_channel_token_file")
    options = parser.parse_args()
    try:
        token = Token.load(options.token_file)
        if options.handoffs:
            print(json.dumps(handoffs(options.address, token=token), indent=2))
            return 0
        document = wait_released(options.address, options.wait, token)
    except (SideChannelFailure, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(document, indent=2))
    return 0 if released(document) else 1


if __name__ == "__main__":
    sys.exit(main())
