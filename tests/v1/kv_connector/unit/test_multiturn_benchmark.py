# SPDX-License-Identifier: Apache-2.0
"""The multi-turn benchmark's parts that need no engine."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import multiturn
from bench_requests import Answer
from multiturn_legs import Prefill, Served
from multiturn_plot import plot, table
from multiturn_records import Run, Turn, load_runs
from multiturn_run import Measured, describe
from multiturn_stats import (
    Spread,
    differing_conversations,
    gains,
    groups,
    most_excess,
    summary,
)
from multiturn_traffic import (
    Setting,
    Traffic,
    TrafficError,
    conversations,
    in_turn,
    settings,
)
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConnectorConfig

TRAFFIC = Traffic(3, 4, 50, 20, 10, 2.0, (3, 900))
P5EN = Path(multiturn.__file__).with_name("serve_multiturn_p5en.sh")
PNG = b"\x89PNG\r\n\x1a\n"

OFF, ON = Setting(False, False), Setting(False, True)


def make_turn(number: int = 1, ttft: float = 1.0, **fields: Any) -> Turn:
    turn = Turn(
        conversation=0,
        turn=number,
        prompt_tokens=100 * number,
        new_tokens=60,
        ttft=ttft,
        total=ttft + 1,
        prefill=ttft * 0.9,
        transfer=0.1,
        compute=ttft * 0.5,
        waiting=ttft * 0.4 - 0.1,
        tokens_computed=70,
        tokens_cached=0,
        tokens_read=100 * number - 70,
        read_outcome="read",
        answer=(5, 6, number),
    )
    return replace(turn, **fields)


def make_run(
    setting: Setting = OFF, repetition: int = 0, mode: str = "push", **fields: Any
) -> Run:
    run = Run(
        mode,
        setting,
        repetition,
        place=0,
        comparable=True,
        through_router=False,
        started_at=100.0 * repetition + 10 * setting.bidirectional,
        load_average=1.5,
        seconds=4.0,
        reader_tokens=30,
        turns=[make_turn(1), make_turn(2)],
    )
    return replace(run, **fields)


def with_ttfts(setting: Setting, *ttfts: float) -> list[Run]:
    return [
        make_run(setting, repetition, turns=[make_turn(1), make_turn(2, ttft)])
        for repetition, ttft in enumerate(ttfts)
    ]


# ---- traffic


def test_conversations_grow_as_told_and_stay_in_range() -> None:
    made = conversations(TRAFFIC, 0)

    assert [one.number for one in made] == [0, 1, 2]
    for one in made:
        assert [len(said) for said in one.said] == [50, 20, 20, 20]
        assert all(3 <= token < 900 for said in one.said for token in said)
        assert all(1.0 <= pause <= 3.0 for pause in one.pauses[1:])
    assert [one.pauses[0] for one in made] == [
        0.0,
        pytest.approx(2 / 3),
        pytest.approx(4 / 3),
    ]
    assert [TRAFFIC.prompt_tokens(turn) for turn in (1, 2, 4)] == [50, 80, 140]
    assert TRAFFIC.longest_tokens == 150


def test_only_what_must_differ_differs() -> None:
    first = conversations(TRAFFIC, 0)

    assert conversations(TRAFFIC, 0) == first
    others = (
        conversations(TRAFFIC, 1),
        conversations(TRAFFIC, 0, "other"),
        conversations(replace(TRAFFIC, seed=1), 0),
    )
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert one.said[0][:8] != another.said[0][:8]
    assert len({one.said for one in first}) == len(first)


def test_every_setting_comes_first_and_last() -> None:
    choices = settings([False, True], [False, True])
    orders = [in_turn(choices, repetition) for repetition in range(4)]

    assert len(set(choices)) == 4
    assert all(sorted(map(str, order)) == sorted(map(str, choices)) for order in orders)
    assert {order[0] for order in orders} | {order[-1] for order in orders} == set(
        choices
    )
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("turns", 0, "--turns is 0"),
        ("think", -1.0, "--think is -1.0"),
        ("token_range", (9, 9), "--token-range is 9 9"),
        ("conversations", 400, "is 1600, expected at most 500"),
    ],
)
def test_impossible_traffic_is_refused(field: str, value: Any, named: str) -> None:
    with pytest.raises(TrafficError, match=named):
        replace(TRAFFIC, **{field: value})


# ---- what is put together for a turn


def measured(asked: str | None, prefill: Prefill | None) -> Measured:
    return Measured(0, 2, 60, 200, Served("t2", asked, Answer((1,), 0.5, 0.7), prefill))


def test_a_turn_is_what_client_response_and_record_tell() -> None:
    record = {"outcome": "read", "tokens": 120, "seconds": 0.1}
    turn = describe(
        measured("t1", Prefill(0.4, 200, cached=150, compute=0.2)), {"t1": record}
    )

    assert (turn.tokens_computed, turn.tokens_cached, turn.tokens_read) == (50, 30, 120)
    assert (turn.transfer, turn.compute) == (0.1, 0.2)
    assert turn.waiting == pytest.approx(0.1)
    assert turn.read_outcome == "read"


def test_a_failed_read_counts_as_none() -> None:
    record = {"outcome": "recomputed", "tokens": 120, "seconds": 0.1}
    turn = describe(
        measured("t1", Prefill(0.4, 200, cached=0, compute=0.2)), {"t1": record}
    )

    assert (turn.tokens_computed, turn.tokens_read) == (200, 0)
    assert turn.read_outcome == "recomputed"


def test_what_is_not_told_is_not_invented() -> None:
    silent = Prefill(0.4, 200, cached=None, compute=None)

    turn = describe(measured(None, silent), {})
    assert (turn.tokens_computed, turn.tokens_cached) == (None, None)
    assert (turn.compute, turn.waiting) == (None, None)
    assert (turn.tokens_read, turn.read_outcome) == (0, "not asked")

    turn = describe(measured("t1", replace(silent, cached=150)), {})
    assert (turn.tokens_read, turn.tokens_cached, turn.transfer) == (None, None, None)
    assert (turn.tokens_computed, turn.read_outcome) == (50, "unknown")

    turn = describe(measured(None, None), {})
    assert (turn.prefill, turn.tokens_read, turn.read_outcome) == (None, None, None)


# ---- records


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    run = make_run(ON, 2)

    path = run.save(tmp_path, {"model": "some"})

    assert path.name == "push_pcache-off_bidi-on_rep3.json"
    assert load_runs(tmp_path) == [run]
    document = json.loads(path.read_text())
    assert document["about"] == {"model": "some"}
    assert document["turns_per_second"] == 0.5
    path.write_text(json.dumps({**document, "format": 0}))
    with pytest.raises(ValueError, match="not of format"):
        load_runs(tmp_path)


# ---- statistics


def test_a_spread_is_over_runs_not_turns() -> None:
    turns = [
        make_turn(2, ttft, conversation=n) for n, ttft in enumerate((1.0, 2.0, 9.0))
    ]
    runs = [make_run(repetition=0, turns=turns)]
    runs += [make_run(repetition=n, turns=[make_turn(2, n + 3.0)]) for n in (1, 2)]
    (group,) = groups(runs)

    assert group.spread(2, "ttft") == Spread(4.0, 2.0, 5.0, 3)
    assert group.spread(1, "ttft") is None
    assert group.turns() == [2]


def test_unknown_values_have_no_spread() -> None:
    turns = [make_turn(1, compute=None, tokens_computed=None)]
    (group,) = groups([make_run(turns=turns)])

    assert group.spread(1, "compute") is None
    assert most_excess(group) is None


def test_the_gain_compares_medians_and_pairs() -> None:
    runs = [*with_ttfts(ON, 1.0, 2.0, 1.5), *with_ttfts(OFF, 3.0, 4.0, 9.0)]
    runs.append(make_run(Setting(True, True)))

    (gain,) = gains(groups(runs))

    assert (gain.mode, gain.p_prefix_caching, gain.prompt_tokens) == (
        "push",
        False,
        200,
    )
    assert gain.of_medians == pytest.approx(4.0 / 1.5)
    assert gain.paired == Spread(3.0, 2.0, 6.0, 3)


def test_no_gain_of_conversations_of_unequal_length() -> None:
    short = make_run(ON, turns=[make_turn(1)])

    assert gains(groups([make_run(OFF), short])) == []


def test_conversations_are_compared_across_settings_and_modes() -> None:
    same = [make_run(OFF), make_run(ON), make_run(OFF, mode="pull", started_at=500.0)]
    assert differing_conversations(same) == (0, 2)

    other = make_run(ON, turns=[make_turn(1), make_turn(2, answer=(5, 6, 99))])
    assert differing_conversations([make_run(OFF), other]) == (1, 1)
    assert differing_conversations(
        [make_run(OFF), replace(other, comparable=False)]
    ) == (
        0,
        0,
    )


def test_excess_is_of_later_turns() -> None:
    turns = [make_turn(1, tokens_computed=500), make_turn(2, tokens_computed=85)]
    (group,) = groups([make_run(ON, turns=turns)])

    assert most_excess(group) == 25


def test_the_summary_holds_rates_hits_and_errors() -> None:
    runs = [make_run(OFF), make_run(ON, errors=["conversation 0, turn 3: gone"])]

    document = summary(runs, 96)

    assert document["errors"] == ["conversation 0, turn 3: gone"]
    assert document["allowed_excess"] == 96
    (first, second) = document["settings"]
    assert (first["bidirectional"], second["bidirectional"]) == (False, True)
    assert second["turns_per_second"]["median"] == 0.5
    assert second["load_average"]["high"] == 1.5
    assert second["share_read_from_d"] == pytest.approx((30 + 130) / 300)
    assert second["read_outcomes"] == {"read": 2}
    assert second["turns"][1]["ttft"]["count"] == 1
    assert json.loads(json.dumps(document)) == document


# ---- table and plot


def test_the_table_has_first_and_last_turn_and_the_gain() -> None:
    runs = [*with_ttfts(ON, 1.0, 2.0, 1.5), *with_ttfts(OFF, 3.0, 4.0, 9.0)]

    lines = table(runs, 96).splitlines()

    assert len([line for line in lines if line.startswith("| push")]) == 4
    assert "4,000 (3,000-9,000)" in lines[3]
    assert "off is 2.67 times that with it on (medians of 3 runs" in lines[-2]
    assert "at most 10 tokens more than the new ones (96 allowed)" in lines[-1]


def test_the_plot_is_a_picture_of_all_modes(tmp_path: Path) -> None:
    runs = [
        make_run(setting, mode=mode, turns=[make_turn(1), make_turn(2, transfer=None)])
        for mode in ("push", "pull")
        for setting in settings([False, True], [False, True])
    ]
    both, one = tmp_path / "made" / "both.png", tmp_path / "one.png"

    plot(runs, both)
    plot(runs[:1], one)

    for path in (both, one):
        assert path.read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="nothing to plot"):
        plot([make_run(turns=[])], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


# ---- command line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--repetitions", "0"], "--repetitions is 0"),
        (["--turns", "0"], "--turns is 0"),
        (["--prefill-url", "http://p:1"], "--model is missing"),
        (["--model", "m", "--router-url", "http://r:1"], "--prefill-url"),
        (
            [
                "--model",
                "m",
                "--prefill-url",
                "http://p:1",
                "--decode-url",
                "http://d:1",
            ],
            "--modes names two",
        ),
        (
            [
                *("--model", "m", "--modes", "push", "--prefill-url", "http://p:1"),
                *("--decode-url", "http://d:1"),
            ],
            "the side channel of http://p:1 is missing",
        ),
        (["--decode-side-channel", "5600"], "'5600' is not HOST:PORT"),
    ],
)
def test_unusable_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        multiturn.main(arguments)
    assert named in capsys.readouterr().err


# ---- the launcher for P5en


def p5en(**settings: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", **settings}
    return subprocess.run(
        ["bash", str(P5EN)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B", "zai-org/GLM-5-FP8"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_p5en_launcher_gives_usable_settings(
    model: str, mode: str, role: str
) -> None:
    done = p5en(HOST_IP="10.0.0.1", ROLE=role, MODE=mode, MODEL=model)

    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    assert command[:3] == ["vllm", "serve", model]
    transfer = KVTransferConfig(
        **json.loads(command[command.index("--kv-transfer-config") + 1])
    )
    names = {"push": "NixlPushConnector", "pull": "NixlConnector"}
    assert transfer.kv_connector == names[mode]
    assert transfer.is_kv_producer is (role == "prefill")
    config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
    assert config.bidirectional_kv_xfer
    assert config.backends == ("LIBFABRIC",)
    assert ("--no-enable-prefix-caching" in command) is (role == "prefill")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "HOST_IP is not set"),
        ({"ROLE": "both"}, "ROLE is 'both'"),
        ({"ROLE": "prefill", "MODE": "shove"}, "MODE is 'shove'"),
        ({"ROLE": "prefill", "MODEL": "gpt2"}, "MODEL is 'gpt2'"),
        ({"ROLE": "prefill", "P_PREFIX_CACHING": "x"}, "P_PREFIX_CACHING is 'x'"),
    ],
)
def test_the_p5en_launcher_names_what_is_wrong(
    settings: dict[str, str], named: str
) -> None:
    host = {"HOST_IP": "10.0.0.1"} if settings else {}
    done = p5en(**host, **settings)

    assert done.returncode == 2
    assert named in done.stderr
