# SPDX-License-Identifier: Apache-2.0
"""A running pair is verified as its operators do it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verify_pd
from pd_launcher import Mode, Pair

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

SCRIPT = Path(verify_pd.__file__).with_name("verify_pd.sh")
RUN_TIMEOUT_S = 200
PROMPTS = 15


async def _verify(*arguments: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run,
        [str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", ["push"])
async def test_pair_passes(pair: Pair) -> None:
    page = await _verify("--router", pair.router.url, "--long-tokens", "512")

    assert re.match(rf"# KV hand-off at {pair.router.url}: PASS\n", page)
    assert f"{2 * PROMPTS} of {2 * PROMPTS} equal token for token" in page
    assert "D computed 0 prompt tokens itself" in page
    assert "NixlPushConnector over UCX, on all engines" in page
    assert "1 rank(s), torch.float32, DRAM, blocks of 32 tokens" in page


@pytest.mark.full
async def test_pair_passes_the_drill(pair: Pair, mode: Mode) -> None:
    page = await _verify("--router", pair.router.url, "--drill")

    assert page.count("| PASS   | drill: ") == 4


@pytest.mark.full
async def test_legs_are_sent_without_a_router(pair: Pair, mode: Mode) -> None:
    arguments = []
    for role, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        arguments += [f"--{role}", f"{engine.url},{engine.side_channel}"]

    page = await _verify(*arguments, "--drill", "--strict")

    assert "both legs sent straight to the engines" in page
