# SPDX-License-Identifier: Apache-2.0
"""Prompts with sound: what was heard is handed over with what was read.

The prefill engine, asked alone, is the reference.
"""

from __future__ import annotations

import pytest

from handoff_client import CHAT, Body, Client, Reply, assert_clean, handoffs
from handoff_engines import EngineRoom
from pd_launcher import Mode
from tiny_audio import tone
from tiny_model import as_text

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.full,
    pytest.mark.timeout(300, func_only=True),
]

WORDS = list(range(10, 60))
SECONDS = 4.0
TOKENS_PER_SECOND = 25


@pytest.mark.parametrize("mode", ["push"])
async def test_audio(room: EngineRoom, client: Client, mode: Mode) -> None:
    pair = room.pair(mode, f"{mode}-prefill-audio", f"{mode}-decode-audio")
    said: dict[float, str] = {}
    for hertz in (300.0, 1200.0):
        before = len(await handoffs(pair.decode))
        answer = await client.post(pair.router, _body(hertz), CHAT)
        (record,) = (await handoffs(pair.decode))[before:]
        alone = await client.post(pair.prefill, _body(hertz), CHAT)

        said[hertz] = _text(answer)
        assert said[hertz] == _text(alone)
        assert record["outcome"] == "received"
        # Equal words and other sounds: nothing behind the sound's begin is shared.
        assert record["tokens"] >= len(WORDS) + SECONDS * TOKENS_PER_SECOND - 1
    first, second = said.values()
    assert first != second

    # What was heard before is known again, on both sides.
    again = await client.post(pair.router, _body(300.0), CHAT)
    assert _text(again) == first
    await assert_clean(client, pair)


def _body(hertz: float) -> Body:
    sound = {"type": "audio_url", "audio_url": {"url": tone(hertz, SECONDS)}}
    words = {"type": "text", "text": as_text(WORDS)}
    return {
        "model": "model",
        "messages": [{"role": "user", "content": [sound, words]}],
        "max_tokens": 16,
        "temperature": 0,
    }


def _text(reply: Reply) -> str:
    assert reply.status == 200, reply
    return reply.chat_text
