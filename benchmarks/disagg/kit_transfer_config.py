# SPDX-License-Identifier: Apache-2.0
"""Prints the ``--kv-transfer-config`` of one engine; ``serve_pd.sh`` calls it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def transfer_config(
    connector: str,
    role: str,
    engine_id: str,
    device: str,
    backends: Sequence[str],
    *,
    inline: bool = False,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document; ``extra`` wins over what is chosen here."""
    connector_extra: dict[str, Any] = {"backends": list(backends)}
    if inline:
        connector_extra["transfer_thread"] = False
    return {
        "kv_connector": connector,
        "kv_role": role,
        "engine_id": engine_id,
        "kv_buffer_device": device,
        "kv_connector_extra_config": {**connector_extra, **(extra or {})},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    for name in ("connector", "role", "engine-id", "device", "backends"):
        add(f"--{name}", required=True)
    add("--inline", choices=("true", "false"), default="false")
    add("--extra", default="")
    options = parser.parse_args(argv)
    try:
        extra = json.loads(options.extra or "{}")
    except ValueError as error:
        extra = error
    if not isinstance(extra, dict):
        print(
            f"EXTRA_CONFIG is {options.extra!r}, expected a JSON object such as "
            '{"num_threads": 4}',
            file=sys.stderr,
        )
        return 2
    document = transfer_config(
        options.connector,
        options.role,
        options.engine_id,
        options.device,
        options.backends.split(),
        inline=options.inline == "true",
        extra=extra,
    )
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
