# SPDX-License-Identifier: Apache-2.0
"""What a soak does wrong on purpose, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fault_rules import Rule
from pd_launcher import Mode

MODES: tuple[Mode, ...] = ("push", "pull")
REQUESTS_PER_MINUTE = 40.0
FAULTS_PER_MINUTE = 8.0

_LOST: dict[Mode, tuple[str, ...]] = {
    "push": ("register", "accepted", "done"),
    "pull": ("lease_request", "lease_granted", "read_done", "read_confirmed"),
}
_OF_TRANSFER: dict[str, Rule] = {
    "failed_post": Rule("post", "fail"),
    "failed_completion": Rule("post", "fail_late"),
    "slow": Rule("post", "delay", seconds=1.5),
}
_OF_MESSAGES: dict[str, Rule] = {
    "repeated": Rule("send", "repeat"),
    "delayed": Rule("send", "delay", seconds=0.4),
}
ABORTS = ("abort_prefill", "abort_decode")
MAY_FAIL = {*ABORTS, "failed_post", "failed_completion"}
"""A request is answered in spite of all other faults of its own."""

OF_ENGINES = ("stop", "cut", "kill")


def request_faults(mode: Mode) -> dict[str, Rule | None]:
    """Faults of single hand-offs by name, with the rule that makes them."""
    lost = {
        f"lost_{kind}": Rule("post", "mute", count=1)
        if kind == "done"
        else Rule("send", "drop", kind, count=1)
        for kind in _LOST[mode]
    }
    return {**lost, **_OF_TRANSFER, **_OF_MESSAGES, **dict.fromkeys(ABORTS)}


def fault_kinds() -> set[str]:
    """All that must have happened."""
    return {kind for mode in MODES for kind in request_faults(mode)} | set(OF_ENGINES)


@dataclass
class Tally:
    """What has happened. ``wrong`` and all after it, but ``reads``, must stay zero."""

    requests: int = 0
    untouched: int = 0
    untouched_ok: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0
    hung: int = 0
    leaked: int = 0
    engine_deaths: int = 0
    reads: int = 0
    details: list[str] = field(default_factory=list)

    def note(self, detail: str) -> None:
        """Show what is wrong as it happens."""
        self.details.append(detail)
        print(f"!! {detail}", flush=True)

    def line(self) -> str:
        """The summary."""
        kinds = ",".join(f"{kind}:{n}" for kind, n in sorted(self.faults.items()))
        return (
            f"requests={self.requests} untouched_ok={self.untouched_ok}/"
            f"{self.untouched} faults={self.faults.total()} by_kind={kinds} "
            f"wrong={self.wrong} lost={self.lost} hung={self.hung} "
            f"leaked={self.leaked} engine_deaths={self.engine_deaths}"
        )

    def shortcomings(self, seconds: float) -> list[str]:
        """Why a run of ``seconds`` seconds has failed, if it has."""
        counts = {
            "wrong": self.wrong,
            "lost": self.lost,
            "hung": self.hung,
            "leaked": self.leaked,
            "engine_deaths": self.engine_deaths,
        }
        found = [f"{name} is {count}" for name, count in counts.items() if count]
        if not self.reads:
            found.append("no earlier turn was read back")
        if self.untouched_ok != self.untouched:
            found.append("a request that no fault touched has failed")
        found += [f"no {k} happened" for k in sorted(fault_kinds() - set(self.faults))]
        minutes = seconds / 60
        for what, count, floor in (
            ("requests", self.requests, REQUESTS_PER_MINUTE),
            ("faults", self.faults.total(), FAULTS_PER_MINUTE),
        ):
            if count < floor * minutes:
                found.append(
                    f"{count / minutes:.1f} {what} per minute, {floor:g} expected"
                )
        return found
