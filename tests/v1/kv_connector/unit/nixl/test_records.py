# SPDX-License-Identifier: Apache-2.0
"""The history of finished hand-offs."""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import RequestId, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.records import (
    KEPT,
    HandoffRecord,
    Records,
)


def _record(transfer_id: str, outcome: str = "received") -> HandoffRecord:
    name = TransferId(transfer_id)
    return HandoffRecord(name, RequestId("r"), "receiver", outcome, tokens=5, bytes=7)


def test_totals_outlive_the_records() -> None:
    records = Records()
    for index in range(KEPT + 3):
        records.add(_record(f"t{index}"))
    records.count("invalid_params")
    assert len(records.latest()) == KEPT
    assert records.latest()[0]["transfer_id"] == "t3"
    assert records.failure(TransferId("t0")) is None
    assert records.totals() == {
        "receiver_received": KEPT + 3,
        "receiver_tokens": 5 * (KEPT + 3),
        "receiver_bytes": 7 * (KEPT + 3),
        "invalid_params": 1,
    }


def test_the_cause_of_a_failure_is_found_by_its_hand_off() -> None:
    records = Records()
    records.add(_record("t", "failed"))
    records.add(_record("u"))
    found = records.failure(TransferId("t"))
    assert found is not None
    assert found["outcome"] == "failed"


def test_a_record_that_tells_a_cause_goes_before_later_ones() -> None:
    records = Records()
    name = TransferId("t")
    cause = HandoffRecord(name, RequestId("r"), "receiver", "failed", cause="refused")
    for record in (cause, _record("t", "aborted")):
        records.add(record)
    found = records.failure(name)
    assert found is not None
    assert found["cause"] == "refused"
