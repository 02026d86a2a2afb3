# SPDX-License-Identifier: Apache-2.0
"""Choice among workers, load accounting and health."""

import pytest

from pd_router.config import Address, Role, WorkerSpec
from pd_router.workers import NoWorkerError, Registry, Work, Worker

PREFILL = Work(Role.PREFILL, {})


def registry(prefill: int, decode: int = 0) -> Registry:
    workers = Registry()
    for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for port in range(1, number + 1):
            workers.add(WorkerSpec(role, Address(f"{role}", port))).mark_up()
    return workers


def test_the_least_busy_worker_is_chosen() -> None:
    workers = registry(3)
    leases = [workers.acquire(PREFILL) for _ in range(3)]
    assert {lease.worker.address.port for lease in leases} == {1, 2, 3}
    leases[1].release()
    assert workers.acquire(PREFILL).worker is leases[1].worker


def test_idle_workers_take_turns() -> None:
    workers = registry(3)
    picked = []
    for _ in range(6):
        with workers.acquire(PREFILL) as worker:
            picked.append(worker.address.port)
    assert picked == [1, 2, 3, 1, 2, 3]


def test_releasing_twice_counts_once() -> None:
    workers = registry(1)
    lease = workers.acquire(PREFILL)
    other = workers.acquire(PREFILL)
    lease.release()
    lease.release()
    assert (other.worker.outstanding, other.worker.load) == (1, 1.0)


def test_unhealthy_and_excluded_workers_are_skipped() -> None:
    workers = registry(3)
    one, two, three = workers
    one.mark_down("refused")
    assert workers.acquire(PREFILL, {two}).worker is three
    with pytest.raises(NoWorkerError, match="no healthy prefill worker"):
        workers.acquire(PREFILL, {two, three})


def test_ready_needs_both_roles() -> None:
    workers = registry(1, 1)
    assert workers.ready()
    decode = workers.healthy(Role.DECODE)[0]
    decode.mark_down("gone")
    assert not workers.ready()
    decode.mark_up()
    workers.remove(Role.PREFILL, Address("prefill", 1))
    assert not workers.ready()


def test_a_new_worker_is_not_chosen_before_a_check() -> None:
    workers = Registry()
    workers.add(WorkerSpec(Role.PREFILL, Address("a", 1)))
    with pytest.raises(NoWorkerError):
        workers.acquire(PREFILL)


def test_one_lost_health_check_is_forgiven_two_are_not() -> None:
    worker = Worker(WorkerSpec(Role.DECODE, Address("a", 1)))
    assert worker.mark_up()
    assert not worker.note_failed_poll("timeout")
    assert worker.healthy
    worker.mark_up()
    assert not worker.note_failed_poll("timeout")
    assert worker.note_failed_poll("timeout")
    assert not worker.healthy
    assert worker.last_error == "timeout"
