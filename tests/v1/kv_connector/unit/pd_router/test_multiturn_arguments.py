# SPDX-License-Identifier: Apache-2.0
"""Command line of the router that continues conversations."""

import subprocess
import sys
from pathlib import Path

import pytest

import pd_router.multiturn
from pd_router.arguments import parse_multiturn_args
from pd_router.config import ConversationSettings, Mode
from pd_router.server import main_multiturn

COMMAND = [
    *("--prefill", "a:1", "--decode", "b:2", "c:3"),
    *("--decode-side-channel", "b:5", "c:5"),
]


def test_the_mode_is_an_option() -> None:
    assert parse_multiturn_args(COMMAND).mode is Mode.PUSH
    pull = parse_multiturn_args(
        ["--mode=pull", *COMMAND, "--prefill-side-channel", "a:5"]
    )
    assert pull.mode is Mode.PULL
    assert [str(w.report_address) for w in pull.workers] == ["a:5", "b:5", "c:5"]
    push = parse_multiturn_args([*COMMAND, "--prefill-side-channel-port", "5601"])
    assert push.workers[0].side_channel is not None
    assert push.workers[0].side_channel.port == 5601


def test_conversations_have_settings() -> None:
    assert parse_multiturn_args(COMMAND).conversations == ConversationSettings(
        ttl=420.0, max_entries=10_000, sticky_margin=8
    )
    given = [
        *("--conversation-ttl", "60.5", "--max-conversations", "7"),
        *("--sticky-margin", "0"),
    ]
    assert parse_multiturn_args([*COMMAND, *given]).conversations == (
        ConversationSettings(ttl=60.5, max_entries=7, sticky_margin=0)
    )


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--conversation-ttl", "0"], "not a number above 0"),
        (["--conversation-ttl", "nan"], "not a number above 0"),
        (["--max-conversations", "0"], "not a whole number from 1"),
        (["--sticky-margin", "-1"], "not a whole number from 0"),
        (["--mode", "both"], "invalid choice: 'both'"),
        (["--mode", "pull", "--prefill-tp-size", "1"], "unrecognized arguments"),
    ],
)
def test_wrong_settings_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_multiturn_args([*COMMAND, *argv])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


def test_a_decode_engine_without_side_channel_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main_multiturn(["--prefill", "a:1", "--decode", "b:2"])
    told = capsys.readouterr().err
    assert "the side channel of decode b:2 is not given" in told
    assert "--decode-side-channel HOST:PORT" in told


def test_the_script_tells_its_options() -> None:
    script = Path(pd_router.multiturn.__file__).parents[1] / "disagg_proxy_multiturn.py"
    ran = subprocess.run(
        [sys.executable, str(script), "--mode", "pull", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for option in ("--mode", "--conversation-ttl", "--prefill-side-channel"):
        assert option in ran.stdout
