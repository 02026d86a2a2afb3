# SPDX-License-Identifier: Apache-2.0
"""Command line of the routers."""

import pytest

from pd_router.arguments import build_parser, parse_args
from pd_router.config import Address, ConfigError, Mode, Role

PUSH_TWO = ["--prefill", "a:1", "b:2", "--decode", "c:3"]


def refused(capsys: pytest.CaptureFixture[str], mode: Mode, *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_args(mode, argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_workers_in_one_flag_or_in_several() -> None:
    together = parse_args(Mode.PULL, PUSH_TWO)
    apart = parse_args(
        Mode.PULL, ["--prefill", "a:1", "--decode", "c:3", "--prefill", "b:2"]
    )
    assert together.workers == apart.workers
    assert [(w.role, str(w.address)) for w in together.workers] == [
        (Role.PREFILL, "a:1"),
        (Role.PREFILL, "b:2"),
        (Role.DECODE, "c:3"),
    ]


def test_push_coordinates_default_to_the_worker_and_port_5600() -> None:
    config = parse_args(Mode.PUSH, ["--prefill", "a:1", "--decode", "c:3"])
    channel = config.workers[0].side_channel
    assert channel is not None
    assert (channel.host, channel.port, channel.engine_id) == ("a", 5600, None)
    assert (channel.tp_size, channel.pp_size) == (1, 1)
    assert config.workers[1].side_channel is None


def test_data_parallel_ranks_are_workers_of_one_server() -> None:
    argv = ["--prefill", "a:1@0", "a:1@1", "--decode", "[::1]:3@2"]
    *prefill, decode = parse_args(Mode.PUSH, argv).workers
    assert [(str(w.address), w.address.url) for w in prefill] == [
        ("a:1@0", "http://a:1"),
        ("a:1@1", "http://a:1"),
    ]
    assert [w.side_channel.port for w in prefill if w.side_channel] == [5600, 5601]
    assert (str(decode.address), decode.address.dp_rank) == ("[::1]:3@2", 2)


def test_push_coordinates_go_to_the_prefill_in_the_same_place() -> None:
    config = parse_args(
        Mode.PUSH,
        [
            *PUSH_TWO,
            *("--prefill-engine-id", "auto", "--prefill-engine-id", "eb"),
            *("--prefill-kv-host", "ka", "kb"),
            *("--prefill-side-channel-port", "5601", "5602"),
            *("--prefill-tp-size", "4"),
            *("--prefill-pp-size", "1", "2"),
        ],
    )
    channels = [w.side_channel for w in config.workers if w.side_channel]
    assert [(c.engine_id, c.host, c.port) for c in channels] == [
        (None, "ka", 5601),
        ("eb", "kb", 5602),
    ]
    assert [(c.tp_size, c.pp_size) for c in channels] == [(4, 1), (4, 2)]


@pytest.mark.parametrize(
    "flag", ["--prefill-engine-id", "--prefill-kv-host", "--prefill-side-channel-port"]
)
def test_one_value_for_two_prefills_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    told = refused(capsys, Mode.PUSH, *PUSH_TWO, flag, "5601")
    assert f"{flag} has 1 value(s) (5601) for 2 --prefill worker(s)" in told


def test_too_many_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, Mode.PUSH, *PUSH_TWO, "--prefill-tp-size", "1", "2", "4")
    assert "--prefill-tp-size has 3 value(s) (1 2 4) for 2" in told
    assert "or a single one for all" in told


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--prefill", "a", "--decode", "c:3"], "'a', which is not host:port"),
        (["--prefill", "a:0", "--decode", "c:3"], "'a:0'"),
        (["--prefill", "a:1", "--decode", "a:1"], "a:1 is listed as prefill and as"),
        (["--prefill", "a:1"], "no --decode worker"),
        (["--prefill", "a:1@x", "--decode", "c:3"], "'x' is no data-parallel rank"),
        (["--prefill", "a:1@0", "a:1", "--decode", "c:3"], "a:1 are one server"),
        (["--prefill", "a:1@0", "--decode", "a:1@1"], "decode a:1@1 are one server"),
        (["--prefill", "a:1@0", "a:1@0", "--decode", "c:3"], "a:1@0 is listed as"),
        (["--decode", "a:1"], "no --prefill worker"),
        (
            ["--prefill", "a:1", "a:2", "--decode", "c:3"],
            "prefill a:1 and prefill a:2 share the side channel a:5600",
        ),
        (
            ["--prefill", "a:1", "--decode", "c:3", "--prefill-tp-size", "0"],
            "--prefill-tp-size got '0'",
        ),
        (
            [
                *("--prefill", "a:1", "--decode", "c:3"),
                *("--prefill-side-channel-port", "no"),
            ],
            "--prefill-side-channel-port got 'no'",
        ),
        (
            ["--prefill", "a:1", "--decode", "c:3", "--idle-timeout", "0"],
            "not a number above 0",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    capsys: pytest.CaptureFixture[str], argv: list[str], told: str
) -> None:
    assert told in refused(capsys, Mode.PUSH, *argv)


def test_an_admin_key_allows_to_start_without_workers() -> None:
    config = parse_args(Mode.PUSH, ["--admin-key", "k"])
    assert config.workers == ()
    assert config.admin_key == "k"


def test_the_admin_key_can_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PD_ROUTER_ADMIN_KEY", "from-env")
    assert parse_args(Mode.PULL, []).admin_key == "from-env"
    assert "from-env" not in build_parser(Mode.PULL).format_help()


def test_every_wait_has_a_flag() -> None:
    argv = ["--prefill", "a:1", "--decode", "b:2"]
    for seconds, name in enumerate(
        ("connect", "prefill", "first-event", "idle", "drain", "health"), 11
    ):
        argv += [f"--{name}-timeout", str(seconds)]
    timeouts = parse_args(Mode.PULL, argv).timeouts
    assert (timeouts.connect, timeouts.prefill, timeouts.first_event) == (11, 12, 13)
    assert (timeouts.idle, timeouts.drain, timeouts.health) == (14, 15, 16)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:80", "localhost", 80),
        ("http://10.0.0.1:8100/", "10.0.0.1", 8100),
        ("[::1]:8100", "::1", 8100),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = Address.parse(text, "--prefill")
    assert (address.host, address.port) == (host, port)
    assert Address.parse(address.url, "--prefill") == address


@pytest.mark.parametrize("text", ["", ":80", "a:", "a:b", "a:70000", "::1:80", "a:8/x"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="not host:port"):
        Address.parse(text, "--prefill")
