# SPDX-License-Identifier: Apache-2.0
"""The prefill side in the scheduler, on a real block pool."""

import time
from typing import Any

import pytest

from v1.kv_connector.unit.nixl.engine_side import (
    ABORTED,
    BLOCK,
    BLOCKS,
    LENGTH,
    STOPPED,
    allocate,
    available,
    finish,
    free,
    pool,
    request,
    step,
    tables,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Expect,
    Retract,
    Withdraw,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    Retracted,
    SenderClosed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    Mode,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    PrefillAddress,
    PrefillParams,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.prompt import prompt_digest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.patience import (
    YIELD_SECONDS,
    YIELD_STEPS,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.pins import PinBoard
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.prefill import (
    LINGER_SECONDS,
    PrefillSide,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.records import Records
from vllm.v1.request import RequestStatus

T = TransferId("t")
ADDRESS = PrefillAddress("127.0.0.1", 5600, EngineId("p"))


class Side:
    """A prefill side with its surroundings."""

    def __init__(
        self,
        world_size: int = 1,
        chunked: bool = False,
        mode: Mode = Mode.PUSH,
        staged: bool = False,
    ) -> None:
        self.pool = pool()
        self.pins = PinBoard()
        self.pins.bind(self.pool, tables)
        self.records = Records()
        self.side = PrefillSide(
            mode,
            chunked,
            ADDRESS,
            BLOCK,
            world_size,
            True,
            self.pins,
            self.records,
            staged,
        )

    def closed(
        self, generation: int, rank: int = 0, reason: CloseReason = CloseReason.SERVED
    ) -> None:
        size = TransferSize(1000, 2)
        self.side.closed(rank, SenderClosed(T, generation, reason, 40, size, 0.5))

    def free(self) -> int:
        return available(self.pool)

    def last(self) -> dict[str, object]:
        return self.records.latest()[-1]


@pytest.fixture
def side() -> Side:
    return Side()


def test_a_prompt_is_offered_in_the_step_that_completes_it(side: Side) -> None:
    prompt = request("r-12345678")
    side.side.new_request(prompt, PrefillParams(T, 2))
    held = allocate(side.pool, 3)
    tables = {prompt.request_id: held}
    commands, offers = side.side.build(step(new=[(prompt, 0, 30)], tables=tables), 0)
    assert commands == [Expect(T, 2, (TransferId("r-12345678"), TransferId("r")))]
    assert offers == []
    _, (offer,) = side.side.build(step(running=[(prompt, 30, 10)], tables=tables), 1)
    assert (offer.transfer_id, offer.prompt_tokens) == (T, 40)
    offer = offer.complete()
    assert offer.digest == prompt_digest(prompt.prompt_token_ids)
    assert offer.complete() is offer
    assert [group.tolist() for group in offer.blocks] == list(held.get_block_ids())
    result = side.side.finished(finish(prompt, LENGTH), held.get_block_ids())
    assert result is not None
    assert result["transfer_id"] == T
    assert result["remote_port"] == 5600
    free(side.pool, held)
    assert side.free() == BLOCKS - 4
    side.closed(offer.generation)
    assert side.free() == BLOCKS - 1
    assert not any(side.side.sizes().values())
    last = side.last()
    assert (last["outcome"], last["tokens"], last["bytes"]) == ("served", 40, 1000)


def _offered(side: Side) -> tuple[Any, Any, int]:
    prompt = request("r-12345678")
    side.side.new_request(prompt, PrefillParams(T, None))
    held = allocate(side.pool, 4)
    output = step(new=[(prompt, 16, 24)], tables={prompt.request_id: held})
    _, (offer,) = side.side.build(output, 0)
    # A lookahead block is not part of the prompt.
    assert len(offer.complete().blocks[0]) == 3
    return prompt, held, offer.generation


def test_blocks_are_held_until_every_rank_has_let_go() -> None:
    side = Side(world_size=2)
    prompt, held, generation = _offered(side)
    side.side.finished(finish(prompt, STOPPED), held.get_block_ids())
    free(side.pool, held)
    side.closed(generation, rank=1)
    side.closed(generation, rank=1)
    assert side.free() == BLOCKS - 4
    side.closed(generation, rank=0)
    assert side.free() == BLOCKS - 1


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        ((CloseReason.RELEASED, CloseReason.SERVED), "served"),
        ((CloseReason.SERVED, CloseReason.RELEASED), "served"),
        ((CloseReason.EXPIRED, CloseReason.SERVED), "expired"),
        ((CloseReason.WITHDRAWN, CloseReason.SERVED), "withdrawn"),
        ((CloseReason.RELEASED, CloseReason.RELEASED), "released"),
    ],
)
def test_the_outcome_is_what_the_ranks_say_together(
    reasons: tuple[CloseReason, CloseReason], outcome: str
) -> None:
    side = Side(world_size=2)
    _, _, generation = _offered(side)
    for rank, reason in enumerate(reasons):
        side.closed(generation, rank=rank, reason=reason)
        # What a rank says twice is not moved twice.
        side.closed(generation, rank=rank, reason=reason)
    (record,) = side.records.latest()
    assert record["outcome"] == outcome
    assert (record["bytes"], record["tokens"]) == (2000, 40)


def test_ranks_may_let_go_before_the_request_ends(side: Side) -> None:
    prompt, held, generation = _offered(side)
    side.closed(generation, reason=CloseReason.EXPIRED)
    side.closed(generation)
    assert side.last()["outcome"] == "expired"
    side.side.finished(finish(prompt, STOPPED), held.get_block_ids())
    free(side.pool, held)
    assert side.free() == BLOCKS - 1


def test_an_aborted_prompt_is_withdrawn(side: Side) -> None:
    prompt = request("r-12345678")
    side.side.new_request(prompt, PrefillParams(T, None))
    assert side.side.finished(finish(prompt, ABORTED), ([],)) is None
    commands, _ = side.side.build(step(), 0)
    assert [type(command) for command in commands] == [Expect, Withdraw]
    assert not any(side.side.sizes().values())
    assert side.last()["outcome"] == "withdrawn"


def test_an_abort_after_the_offer_waits_for_the_ranks(side: Side) -> None:
    prompt, held, generation = _offered(side)
    assert side.side.finished(finish(prompt, ABORTED), held.get_block_ids()) is None
    free(side.pool, held)
    (command,), _ = side.side.build(step(), 1)
    assert isinstance(command, Withdraw)
    assert side.free() == BLOCKS - 4
    side.closed(generation, reason=CloseReason.WITHDRAWN)
    assert side.free() == BLOCKS - 1


def test_a_preempted_prompt_is_offered_when_it_is_complete_again(side: Side) -> None:
    prompt = request("r-12345678")
    side.side.new_request(prompt, PrefillParams(T, None))
    first = allocate(side.pool, 2)
    tables = {prompt.request_id: first}
    assert side.side.build(step(new=[(prompt, 0, 32)], tables=tables), 0)[1] == []
    free(side.pool, first)
    again = allocate(side.pool, 3)
    tables = {prompt.request_id: again}
    _, (offer,) = side.side.build(step(running=[(prompt, 0, 40)], tables=tables), 1)
    assert offer.complete().blocks[0].tolist() == again.get_block_ids()[0]


# ---- chunk by chunk


@pytest.fixture
def chunked() -> Side:
    return Side(chunked=True)


def _begin(side: Side, blocks: int = 3) -> tuple[Any, Any]:
    prompt = request("r-12345678")
    side.side.new_request(prompt, PrefillParams(T, None))
    return prompt, allocate(side.pool, blocks)


def _step(
    side: Side, prompt: Any, held: Any, computed: int, scheduled: int, **more: Any
) -> Any:
    tables = {prompt.request_id: held}
    output = step(running=[(prompt, computed, scheduled)], tables=tables)
    output.preempted_req_ids = more.get("preempted")
    return side.side.build(output, more.get("now", 0))


def test_full_blocks_are_offered_as_they_are_computed(chunked: Side) -> None:
    prompt, held = _begin(chunked)
    blocks = held.get_block_ids()[0]
    found = []
    for computed, scheduled in ((0, 10), (10, 10), (20, 11), (31, 1), (32, 8)):
        _, offers = _step(chunked, prompt, held, computed, scheduled)
        found += [
            (o.first_block, o.complete().blocks[0].tolist(), o.missing_tokens)
            for o in offers
        ]
    assert found == [
        (0, blocks[:1], 24),
        (1, blocks[1:2], 8),
        (2, blocks[2:], 0),
    ]
    result = chunked.side.finished(finish(prompt, LENGTH), held.get_block_ids())
    assert result is not None
    free(chunked.pool, held)
    assert chunked.free() == BLOCKS - 4
    chunked.closed(offers[-1].generation)
    assert chunked.free() == BLOCKS - 1


def test_a_cached_prefix_is_part_of_the_first_chunk(chunked: Side) -> None:
    prompt, held = _begin(chunked)
    _, (offer,) = _step(chunked, prompt, held, 16, 16)
    assert (offer.first_block, len(offer.complete().blocks[0])) == (0, 2)


def test_an_abort_between_chunks_waits_for_the_ranks(chunked: Side) -> None:
    prompt, held = _begin(chunked)
    _, (offer,) = _step(chunked, prompt, held, 0, 16)
    assert chunked.side.finished(finish(prompt, ABORTED), held.get_block_ids()) is None
    free(chunked.pool, held)
    (command,), _ = chunked.side.build(step(), 1)
    assert isinstance(command, Withdraw)
    assert chunked.side.release_due(time.monotonic())
    assert chunked.free() == BLOCKS - 2
    chunked.closed(offer.generation, reason=CloseReason.WITHDRAWN)
    assert chunked.free() == BLOCKS - 1
    assert chunked.last()["outcome"] == "withdrawn"
    assert not any(chunked.side.sizes().values())


def test_a_preempted_prompt_is_retracted_and_offered_anew(chunked: Side) -> None:
    prompt, first = _begin(chunked, 2)
    _, (offer,) = _step(chunked, prompt, first, 0, 32)
    prompt.status = RequestStatus.PREEMPTED
    free(chunked.pool, first)
    # Its blocks are held yet, so there is something to wait for.
    assert chunked.free() == BLOCKS - 3
    assert chunked.side.yields_soon(0)
    output = step()
    output.preempted_req_ids = {prompt.request_id}
    commands, offers = chunked.side.build(output, 1)
    assert (commands, offers) == ([Retract(T, offer.generation)], [])
    assert chunked.side.yields_soon(1)
    assert chunked.side.release_due(1)
    chunked.side.retracted(0, Retracted(T, offer.generation))
    assert chunked.free() == BLOCKS - 1
    assert not chunked.side.yields_soon(1)

    prompt.status = RequestStatus.RUNNING
    again = allocate(chunked.pool, 3)
    _, (whole,) = _step(chunked, prompt, again, 0, 40)
    assert whole.generation > offer.generation
    assert whole.complete().blocks[0].tolist() == again.get_block_ids()[0]
    # A late word about the first generation changes nothing.
    chunked.side.retracted(0, Retracted(T, offer.generation))
    chunked.closed(offer.generation)
    assert chunked.side.sizes()["prefill_open"] == 1


def test_one_that_is_preempted_and_resumed_in_a_step_begins_anew(chunked: Side) -> None:
    prompt, first = _begin(chunked, 2)
    _, (offer,) = _step(chunked, prompt, first, 0, 32)
    free(chunked.pool, first)
    again = allocate(chunked.pool, 3)
    preempted = {prompt.request_id}
    (command,), (anew,) = _step(chunked, prompt, again, 0, 16, preempted=preempted)
    assert command == Retract(T, offer.generation)
    assert anew.first_block == 0
    assert anew.generation > offer.generation


def test_retracted_blocks_wait_for_every_rank() -> None:
    side = Side(world_size=2, chunked=True)
    prompt, held = _begin(side)
    _, (offer,) = _step(side, prompt, held, 0, 16)
    free(side.pool, held)
    output = step()
    output.preempted_req_ids = {prompt.request_id}
    side.side.build(output, 1)
    for _ in range(2):
        side.side.retracted(1, Retracted(T, offer.generation))
    assert side.free() == BLOCKS - 2
    side.side.retracted(0, Retracted(T, offer.generation))
    assert side.free() == BLOCKS - 1


def test_the_wait_for_retracted_blocks_is_bounded(chunked: Side) -> None:
    prompt, held = _begin(chunked)
    _step(chunked, prompt, held, 0, 16)
    free(chunked.pool, held)
    output = step()
    output.preempted_req_ids = {prompt.request_id}
    chunked.side.build(output, 1)
    for _ in range(YIELD_STEPS):
        assert chunked.side.yields_soon(1 + YIELD_SECONDS)
        chunked.side.build(step(), 2)
    assert not chunked.side.yields_soon(1 + YIELD_SECONDS)


def test_a_transfer_id_in_use_is_not_taken_twice(side: Side) -> None:
    _, _, generation = _offered(side)
    second = request("s-12345678")
    side.side.new_request(second, PrefillParams(T, None))
    held = allocate(side.pool, 3)
    output = step(new=[(second, 0, 40)], tables={second.request_id: held})
    assert side.side.build(output, 0) == ([], [])
    assert side.side.finished(finish(second, STOPPED), held.get_block_ids()) is None
    assert side.records.totals()["sender_duplicate_transfer_id"] == 1
    side.closed(generation)
    third = request("u-12345678")
    side.side.new_request(third, PrefillParams(T, None))
    assert side.side.sizes()["prefill_waiting"] == 1


def test_an_earlier_offer_of_the_same_name_closes_nothing(side: Side) -> None:
    _, _, generation = _offered(side)
    side.closed(generation - 1)
    assert side.side.sizes()["prefill_open"] == 1


def test_without_a_transfer_id_the_requests_outside_name_counts(side: Side) -> None:
    side.side.new_request(request("r-12345678"), PrefillParams(None, None))
    (expect,), _ = side.side.build(step(), 0)
    assert isinstance(expect, Expect)
    assert expect.transfer_id == "r"


def test_requests_without_a_hand_off_are_nobodys_business(side: Side) -> None:
    prompt = request("r-12345678")
    held = allocate(side.pool, 3)
    output = step(new=[(prompt, 0, 40)], tables={prompt.request_id: held})
    assert side.side.build(output, 0) == ([], [])
    assert side.side.finished(finish(prompt, STOPPED), held.get_block_ids()) is None


def test_an_idle_engine_steps_on_for_a_while(side: Side) -> None:
    assert not side.side.release_due(0)
    _, _, generation = _offered(side)
    assert side.side.release_due(LINGER_SECONDS / 2)
    assert not side.side.release_due(LINGER_SECONDS * 2)
    side.closed(generation)
    assert not side.side.release_due(0)


# ---- what D may read at once


def _answer(side: Side, blocks: tuple[list[int], ...] | None = None) -> Any:
    """The offer of a prompt of four blocks, and what its router is told."""
    prompt = request("r-12345678")
    side.side.new_request(prompt, PrefillParams(T, None))
    held = allocate(side.pool, 4)
    output = step(new=[(prompt, 0, 40)], tables={prompt.request_id: held})
    _, (offer,) = side.side.build(output, 0)
    ended = finish(prompt, LENGTH)
    return offer.complete(), side.side.finished(ended, blocks or held.get_block_ids())


def test_a_reader_is_told_the_generation_and_a_writer_needs_none() -> None:
    offer, told = _answer(Side(mode=Mode.PULL))
    assert int(told["remote_generation"], 16) == offer.generation
    (group,) = told["remote_block_ids"]
    assert group[: len(offer.blocks[0])] == offer.blocks[0].tolist()
    _, told = _answer(Side(mode=Mode.PUSH))
    assert told["remote_generation"] is None


def test_nobody_reads_before_its_lease_what_has_yet_to_be_copied() -> None:
    _, told = _answer(Side(mode=Mode.PULL, staged=True))
    assert told["remote_generation"] is None


def test_generations_grow_and_cannot_be_told_from_the_one_before() -> None:
    offers = [_answer(Side(mode=Mode.PULL))[0] for _ in range(50)]
    assert len({offer.generation for offer in offers}) == 50
    side = Side()
    first, second = (_offered(side)[2], 0)
    side.closed(first)
    second = _offered(side)[2]
    assert first < second < 2**63


def test_no_hint_is_given_of_blocks_that_were_not_offered() -> None:
    """The request went on, was preempted, and computed anew into others."""
    _, told = _answer(Side(mode=Mode.PULL), ([20, 21, 22, 23],))
    assert told["remote_block_ids"] == [[20, 21, 22, 23]]
    assert told["remote_generation"] is None
