# SPDX-License-Identifier: Apache-2.0
"""The checks of the contract find what is planted, and nothing in a sound router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pd_processes import free_ports
from router_contract.all_checks import CHECKS
from router_contract.bench import Bench, RouterSpec, client, doubles
from router_contract.checks import Check
from router_contract.defects import DEFECTS, Defect
from router_contract.small_router import SmallRouter
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode

BY_NAME = {check.name: check for check in CHECKS}
SOUND = [
    pytest.param(mode, check, id=f"{mode.value}-{check.name}")
    for mode in Mode
    for check in CHECKS
    if check.applies(mode, conversations=True)
]
# What both modes share, the short run finds in the first one.
PLANTED = [
    pytest.param(
        mode,
        defect,
        BY_NAME[name],
        id=f"{defect.router.__name__}-{mode.value}-{name}",
        marks=[] if mode is defect.modes[0] else [pytest.mark.full],
    )
    for defect in DEFECTS
    for mode in defect.modes
    for name in defect.found_by
]


@asynccontextmanager
async def _bench(router: type[SmallRouter], mode: Mode) -> AsyncIterator[Bench]:
    (port,) = free_ports(1)
    spec = RouterSpec(router.__name__, mode, conversations=True)
    async with (
        doubles(mode, side_channels=False) as (prefill, decode),
        client() as session,
    ):
        made = router(
            mode,
            f"127.0.0.1:{prefill.port}",
            f"127.0.0.1:{decode.port}",
            (prefill.side_channel, decode.side_channel),
        )
        async with made.listening(port):
            yield Bench(spec, f"http://127.0.0.1:{port}", prefill, decode, session)


@pytest.mark.parametrize(("mode", "check"), SOUND)
async def test_a_sound_router_passes(mode: Mode, check: Check) -> None:
    async with _bench(SmallRouter, mode) as bench:
        await check.run(bench)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broken router leaves undone is waited for; that need not take long."""
    monkeypatch.setattr("router_contract.failure_checks.ENDED_TIMEOUT_S", 1.0)
    monkeypatch.setattr("router_contract.checks.FIRST_WORD_TIMEOUT_S", 1.0)
    monkeypatch.setattr("router_contract.checks.TOGETHER_TIMEOUT_S", 1.0)
    monkeypatch.setattr("router_contract.engines.KV_TIMEOUT_S", 2.0)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(("mode", "defect", "check"), PLANTED)
async def test_a_planted_defect_is_found(
    mode: Mode, defect: Defect, check: Check
) -> None:
    assert check.applies(mode, conversations=True)
    async with _bench(defect.router, mode) as bench:
        with pytest.raises(AssertionError) as found:
            await check.run(bench)
    assert str(found.value), "the check fails without a word"


def test_every_check_has_something_that_it_finds() -> None:
    for mode in Mode:
        found = {name for d in DEFECTS if mode in d.modes for name in d.found_by}
        wanted = {c.name for c in CHECKS if c.applies(mode, conversations=True)}
        assert wanted <= found, f"{mode.value}: nothing shows that these can fail"
