# SPDX-License-Identifier: Apache-2.0
"""The table of conversations: what is continued, forgotten and released, and when."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from pd_router.config import Address, ConversationSettings
from pd_router.conversations import Conversations, Kept, Key, Turn

HERE, THERE = Address("d", 1), Address("d", 2)
A, B, C = Key(b"a"), Key(b"b"), Key(b"c")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Table:
    """A table, its clock and names for what is kept."""

    ttl: float = 10.0
    max_entries: int = 100
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        settings = ConversationSettings(ttl=self.ttl, max_entries=self.max_entries)
        self.table = Conversations(settings, self.clock)

    def serve(self, key: Key, name: str, worker: Address = HERE) -> Kept:
        return self.finish(self.table.begin(key), name, worker)

    def finish(self, turn: Turn, name: str, worker: Address = HERE) -> Kept:
        kept = Kept(name, worker)
        self.table.finish(turn, kept)
        return kept

    def base(self, key: Key) -> str | None:
        turn = self.table.begin(key)
        self.table.end(turn)
        return turn.base.transfer_id if turn.base else None

    def releases(self) -> list[str]:
        return [kept.transfer_id for kept in self.table.take_releases()]


def test_a_turn_goes_on_from_the_last_one_of_its_conversation() -> None:
    at = Table()
    assert at.base(A) is None
    at.serve(A, "t1")
    at.serve(B, "u1")
    at.serve(A, "t2")
    assert (at.base(A), at.base(B), at.base(C)) == ("t2", "u1", None)
    assert len(at.table) == 2


def test_a_turn_that_ends_without_result_changes_nothing() -> None:
    at = Table()
    at.serve(A, "t1")
    turn = at.table.begin(A)
    assert at.table.promise_release(turn) == "t1"
    at.table.end(turn)
    assert at.base(A) == "t1"
    assert at.releases() == []
    again = at.table.begin(A)
    assert at.table.promise_release(again) == "t1"


def test_what_the_engine_lets_go_of_by_itself_is_not_released_again() -> None:
    at = Table()
    at.serve(A, "t1")
    turn = at.table.begin(A)
    assert at.table.promise_release(turn) == "t1"
    at.finish(turn, "t2")
    assert at.releases() == []


def test_what_is_left_behind_is_released() -> None:
    at = Table()
    at.serve(A, "t1")
    at.serve(A, "t2", THERE)
    assert at.releases() == ["t1"]
    assert at.releases() == []


def test_nothing_is_promised_that_another_turn_goes_on_from() -> None:
    at = Table()
    at.serve(A, "t1")
    first, second = at.table.begin(A), at.table.begin(A)
    assert at.table.promise_release(first) is None
    at.finish(first, "t2")
    assert at.releases() == []
    # Alone with it now.
    assert at.table.promise_release(second) == "t1"
    at.finish(second, "t3")
    assert at.releases() == ["t2"]
    assert at.base(A) == "t3"


def test_the_last_to_leave_releases_what_was_left_behind() -> None:
    at = Table()
    at.serve(A, "t1")
    first, second, third = (at.table.begin(A) for _ in range(3))
    at.finish(second, "t2")
    at.finish(first, "t3")
    assert at.releases() == ["t2"]
    at.table.end(third)
    assert at.releases() == ["t1"]
    assert at.base(A) == "t3"


def test_a_promise_is_made_once_and_binds_until_it_fails() -> None:
    at = Table()
    at.serve(A, "t1")
    first = at.table.begin(A)
    assert at.table.promise_release(first) == "t1"
    second = at.table.begin(A)
    assert second.base is not None
    assert second.base.transfer_id == "t1"
    assert at.table.promise_release(second) is None
    at.finish(second, "t2")
    assert at.releases() == []
    at.table.end(first)
    assert at.releases() == ["t1"]


def test_what_the_engine_has_let_go_of_is_not_promised_again() -> None:
    at = Table()
    at.serve(A, "t1")
    first = at.table.begin(A)
    assert at.table.promise_release(first) == "t1"
    second = at.table.begin(A)
    at.finish(first, "t2")
    assert at.table.promise_release(second) is None
    at.table.end(second)
    assert at.releases() == []


def test_ending_twice_counts_once() -> None:
    at = Table()
    at.serve(A, "t1")
    turn = at.table.begin(A)
    at.finish(turn, "t2")
    at.table.end(turn)
    at.finish(turn, "t3")
    assert at.base(A) == "t2"
    assert at.table.turns_under_way == 0


def test_unused_for_as_long_as_the_ttl_is_forgotten() -> None:
    at = Table(ttl=10.0)
    at.serve(A, "t1")
    at.clock.now += 9.9
    assert at.base(A) == "t1"
    # That was a use.
    at.clock.now += 9.9
    assert at.base(A) == "t1"
    at.clock.now += 10.0
    assert at.base(A) is None
    assert at.releases() == ["t1"]
    assert at.table.totals.dropped["expired"] == 1


def test_a_long_turn_keeps_its_conversation_alive_but_not_what_it_began_from() -> None:
    at = Table(ttl=10.0)
    at.serve(A, "t1")
    turn = at.table.begin(A)
    at.clock.now += 50.0
    assert len(at.table) == 1
    assert at.base(A) is None
    at.finish(turn, "t2")
    assert at.base(A) == "t2"
    assert at.table.totals.dropped["expired"] == 0
    assert next(iter(at.table)).turns == 2


def test_the_one_used_longest_ago_goes_first() -> None:
    at = Table(max_entries=2)
    at.serve(A, "t1")
    at.serve(B, "u1")
    at.clock.now += 1
    assert at.base(A) == "t1"
    at.serve(C, "v1")
    assert (at.base(A), at.base(B), at.base(C)) == ("t1", None, "v1")
    assert at.releases() == ["u1"]
    assert at.table.totals.dropped["evicted"] == 1


def test_what_is_evicted_under_a_turn_is_released_after_it() -> None:
    at = Table(max_entries=1)
    at.serve(A, "t1")
    turn = at.table.begin(A)
    at.serve(B, "u1")
    assert at.releases() == []
    at.table.end(turn)
    assert at.releases() == ["t1"]
    assert at.base(A) is None


def test_deleting_forgets_releases_and_ends_turns_under_way() -> None:
    at = Table()
    at.serve(A, "t1")
    turn = at.table.begin(A)
    assert at.table.delete(A)
    assert at.releases() == []
    at.finish(turn, "t2")
    assert sorted(at.releases()) == ["t1", "t2"]
    assert at.base(A) is None
    assert not at.table.delete(A)
    assert at.table.totals.dropped["deleted"] == 1


def test_deleting_during_the_first_turn_leaves_nothing() -> None:
    at = Table()
    turn = at.table.begin(A)
    assert at.table.delete(A)
    at.finish(turn, "t1")
    assert at.releases() == ["t1"]
    assert len(at.table) == 0
    # A turn that begins after it is another conversation's first.
    at.serve(A, "t2")
    assert at.base(A) == "t2"


def test_ages_and_counts() -> None:
    at = Table(ttl=100.0)
    at.serve(A, "t1")
    at.clock.now += 5
    at.serve(A, "t2")
    at.serve(B, "u1")
    at.clock.now += 2
    last, first = list(at.table)
    assert (last.key, first.key) == (B, A)
    assert (at.table.age_seconds(first), at.table.idle_seconds(first)) == (7, 2)
    assert first.turns == 2


class AnyTraffic(RuleBasedStateMachine):
    """Whatever comes, what is released is what nobody goes on from any more."""

    def __init__(self) -> None:
        super().__init__()
        self.at = Table(ttl=10.0, max_entries=2)
        self.running: list[Turn] = []
        self.kept: list[Kept] = []
        self.let_go: Counter[str] = Counter()
        self.last: dict[Key, str] = {}

    @rule(key=st.sampled_from([A, B, C]))
    def begin(self, key: Key) -> None:
        turn = self.at.table.begin(key)
        if turn.base is not None:
            assert turn.base.transfer_id == self.last[key]
            assert turn.base.transfer_id not in self.let_go
        self.running.append(turn)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def promise(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.running))
        base = turn.base
        users = [t for t in self.running if base and t.base is base]
        told = self.at.table.promise_release(turn)
        if told is not None:
            assert users == [turn]
            assert base is not None
            assert told == base.transfer_id

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.running))
        self.running.remove(turn)
        kept = Kept(f"t{len(self.kept)}", HERE)
        self.kept.append(kept)
        self.at.table.finish(turn, kept)
        if turn.releases_base:
            assert turn.base is not None
            self.let_go[turn.base.transfer_id] += 1
        if not turn.deleted:
            self.last[turn.key] = kept.transfer_id

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.running))
        self.running.remove(turn)
        self.at.table.end(turn)

    @rule(key=st.sampled_from([A, B, C]))
    def delete(self, key: Key) -> None:
        self.at.table.delete(key)
        self.last.pop(key, None)

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        self.at.clock.now += seconds

    @invariant()
    def only_what_nobody_needs_is_released(self) -> None:
        entries = list(self.at.table)
        assert len(entries) <= 2
        for kept in self.at.table.take_releases():
            assert all(entry.kept is not kept for entry in entries)
            assert all(turn.base is not kept for turn in self.running)
            self.let_go[kept.transfer_id] += 1
        assert all(times == 1 for times in self.let_go.values())
        assert self.at.table.turns_under_way == len(self.running)

    def teardown(self) -> None:
        for turn in self.running:
            self.at.table.end(turn)
        self.at.clock.now += 11.0
        assert len(self.at.table) == 0
        for kept in self.at.table.take_releases():
            self.let_go[kept.transfer_id] += 1
        assert dict(self.let_go) == {kept.transfer_id: 1 for kept in self.kept}


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = hypothesis_settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
