# SPDX-License-Identifier: Apache-2.0
"""Routers keep the contract of ``docs/features/routers.md``: ours, or any other.

    pytest tests/v1/kv_connector/nixl_integration/test_router_contract.py \
        --router-mode pull \
        --router-command 'my-router --listen {port} --prefill http://{prefill} \
                          --decode http://{decode}'

The engines are doubles; nothing but the router is needed. One that cannot be started by
a command runs already: give its ``--router-url`` and, as ``--router-ports P,D,PS,DS``,
the ports at which it looks for the engines and their side channels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router_contract.all_checks import CHECKS
from router_contract.bench import (
    OURS,
    Bench,
    RouterSpec,
    command_line,
    doubles,
    running,
)
from router_contract.checks import Check
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode

CHECK_TIMEOUT_S = 120.0
BOTH_MODES_SHARE = {"multiturn-pull"}
"""Left to the long run: its parts are those of the others."""


def _given(config: pytest.Config) -> RouterSpec | None:
    def option(name: str) -> Any:
        return config.getoption(f"--router-{name}", default=None)

    command, url, mode = option("command"), option("url"), option("mode")
    if not command and not url:
        return None
    if (command and url) or mode is None:
        raise pytest.UsageError(
            "give --router-command or --router-url, and --router-mode push or pull"
        )
    ports = tuple(int(port) for port in (option("ports") or "").split(",") if port)
    if url and len(ports) != 4:
        raise pytest.UsageError(
            "--router-url needs --router-ports P,D,PS,DS: where the router looks for "
            "the prefill and the decode engine, and their side channels"
        )
    waived = frozenset(option("waive") or ())
    unknown = waived - {check.name for check in CHECKS}
    if unknown:
        raise pytest.UsageError(f"--router-waive: no check is called {sorted(unknown)}")
    return RouterSpec(
        "router",
        Mode(mode),
        command or "",
        conversations=bool(option("conversations")),
        url=url or "",
        waived=waived,
        ports=(ports[0], ports[1], ports[2], ports[3]) if ports else None,
        ready_path=option("ready-path") or "/health",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "check" not in metafunc.fixturenames:
        return
    given = _given(metafunc.config)
    cases = [
        pytest.param(
            spec,
            check,
            id=f"{spec.name}-{check.name}",
            marks=[pytest.mark.full] if spec.name in BOTH_MODES_SHARE else [],
        )
        for spec in ([given] if given is not None else OURS)
        for check in CHECKS
        if check.applies(spec.mode, spec.conversations)
    ]
    metafunc.parametrize(("spec", "check"), cases)


class Runner:
    """Runs the router that the next check is for, and no other."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._stack = AsyncExitStack()
        self._bench: Bench | None = None

    async def bench(self, spec: RouterSpec) -> Bench:
        """The router between its doubles, all as at the beginning."""
        if self._bench is None or self._bench.spec != spec:
            await self.close()
            self._bench = await self._stack.enter_async_context(
                running(spec, self._log_dir)
            )
        await self._bench.settle()
        return self._bench

    async def close(self) -> None:
        """Stop it."""
        self._bench = None
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Runner]:
    made = Runner(tmp_path_factory.mktemp("router-contract"))
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_keeps_the_contract(
    runner: Runner, spec: RouterSpec, check: Check
) -> None:
    if check.name in spec.waived:
        pytest.skip("waived by --router-waive")
    bench = await runner.bench(spec)
    async with asyncio.timeout(CHECK_TIMEOUT_S):
        await check.run(bench)


async def test_a_command_with_an_unknown_place_is_refused() -> None:
    async with doubles(Mode.PULL, side_channels=False) as (prefill, decode):
        line = command_line("r {prefill} {decode_port}", 1, prefill, decode)
        assert line == f"r 127.0.0.1:{prefill.port} {decode.port}"
        with pytest.raises(ValueError, match=r"'prefil'.*\{prefill\}"):
            command_line("r {prefil}", 1, prefill, decode)
