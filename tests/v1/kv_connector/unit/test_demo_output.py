# SPDX-License-Identifier: Apache-2.0
import io
from dataclasses import replace

import pytest

from demo_output import (
    Moved,
    ProgressLine,
    Result,
    Round,
    after_prefill,
    print_result,
    table,
)
from demo_requests import demo_requests, harbour_log
from pd_client import Answer, Ask
from pd_processes import Stage

ASK = Ask("completion", "hello", 3)
ANSWER = Answer("hi there", "length", 4, 3, 0.5, ttft=0.2, tpot=0.01)
GOOD = Result(ASK, ANSWER, moved=Moved(4, 4096, 2, 0.0125), equal=True)


def test_a_round_succeeds_only_if_all_is_equal_and_released() -> None:
    assert Round("push", [GOOD, GOOD]).succeeded()
    assert not Round("push", []).succeeded()
    still = replace(GOOD, moved=Moved())
    assert not Round("push", [still]).succeeded()
    assert Round("push", [still, replace(GOOD, moved=Moved(1, 2, 3))]).succeeded()
    assert not Round("push", [GOOD], leftovers=["P: 3 of 4"]).succeeded()
    assert not Round("push", [GOOD, replace(GOOD, equal=False)]).succeeded()
    assert not Round("push", [GOOD, Result(ASK, None, "failed")]).succeeded()


def test_the_table_sums_and_takes_medians() -> None:
    slow = replace(GOOD, answer=replace(ANSWER, ttft=0.4))
    whole = replace(GOOD, answer=replace(ANSWER, ttft=None, tpot=None))
    push = Round("push", [GOOD, slow, whole, replace(GOOD, equal=False)])
    pull = Round("pull", [GOOD, Result(ASK, None, "failed")], leftovers=["P", "D"])
    alone = Round("single engine", [Result(ASK, ANSWER)])

    rows = {
        line.split("  ")[0]: line.split()[len(line.split("  ")[0].split()) :]
        for line in table([push, pull, alone]).splitlines()[2:]
    }
    assert rows["median TTFT"] == ["200", "ms", "200", "ms", "200", "ms"]
    assert rows["median hand-off"] == ["12.5", "ms", "12.5", "ms", "-"]
    assert rows["tokens moved"] == ["16", "4", "-"]
    assert rows["bytes moved"] == ["16,384", "4,096", "-"]
    assert rows["descriptors moved"] == ["8", "2", "-"]
    assert rows["equal answers"] == ["3", "of", "4", "1", "of", "2", "reference"]
    assert rows["blocks left in use"][0] == "none"
    assert rows["blocks left in use"][1:4] == ["on", "2", "engine(s)"]


def test_a_result_is_told_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(1, 2, GOOD)
    print_result(2, 2, replace(GOOD, equal=False))
    print_result(2, 2, Result(ASK, None, "answered 503"))
    lines = capsys.readouterr().out.splitlines()
    assert '4 prompt tokens: "hi there"' in lines[0]
    assert lines[1].split(", ") == [
        "      TTFT 200 ms",
        "4 tokens moved",
        "4,096 bytes",
        "2 descriptors",
        "hand-off 12.5 ms",
        "same text as the single engine",
    ]
    assert "DIFFERENT TEXT" in lines[3]
    assert lines[4].endswith("FAILED: answered 503")


def test_a_request_that_moved_nothing_has_no_hand_off_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_result(1, 1, replace(GOOD, moved=Moved()))
    assert "hand-off" not in capsys.readouterr().out


def test_the_hand_off_lasts_from_the_end_of_prefill_to_the_first_decode_step() -> None:
    sender = {"queued_at": 1000.0, "stages": {"queued": 0.0, "prefill_ended": 0.5}}
    receiver = {"queued_at": 1000.25, "stages": {"queued": 0.0, "first_step": 0.375}}
    assert after_prefill(sender, receiver) == 0.125


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stages(seconds: float, ready: bool) -> list[Stage]:
    return [
        Stage("prefill", seconds, "loading " * 20, ready),
        Stage("decode", seconds, "warming up", False),
    ]


def test_progress_overwrites_its_line_on_a_terminal() -> None:
    screen = Terminal()
    line = ProgressLine(screen)
    line.show(stages(1.0, False))
    line.show(stages(1.2, False))
    line.show(stages(2.0, True))
    line.show(stages(2.2, True))
    shown = screen.getvalue().split("\r")[1:]
    assert len({len(part.rstrip("\n")) for part in shown}) == 1
    assert [part.endswith("\n") for part in shown] == [False, False, True, False, False]
    assert "prefill: ready after 2 s" in shown[2]
    assert shown[-1].split() == ["2", "s", "decode:", "warming", "up"]


def test_progress_is_sparing_where_lines_stay() -> None:
    screen = io.StringIO()
    line = ProgressLine(screen)
    for tenth in range(100):
        line.show(stages(tenth / 10, False))
    assert len(screen.getvalue().splitlines()) == 2


def test_long_prompts_are_among_the_requests() -> None:
    asks = demo_requests()
    words = [len(ask.text.split()) for ask in asks]
    assert sum(count > 600 for count in words) >= 2
    assert sum(count > 1500 for count in words) >= 1
    assert any(ask.chat and ask.stream for ask in asks)
    assert any(not ask.stream for ask in asks)
    assert harbour_log(5, 1) == harbour_log(5, 1) != harbour_log(5, 2)
