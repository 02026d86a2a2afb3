# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines with a faulty transport, which die and come back in place."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from fault_rules import CONTROL_VARIABLE, Control
from handoff_engines import BLOCK_SIZE, MAX_BATCHED_TOKENS, SPEC
from pd_launcher import (
    START_TIMEOUT_S,
    Engine,
    EngineConfig,
    Mode,
    Role,
    transfer_config,
)
from pd_processes import free_ports, stop_all, wait_all_ready
from tiny_model import tiny_model
from warm_engines import WarmEngine

Side = Literal["P", "D"]
Policy = Literal["fail", "recompute"]

PEER_TIMEOUT_S = 3.0
HANDSHAKE_TIMEOUT_S = 2.0
LEASE_S = 8.0
REGISTRATION_TIMEOUT_S = 90.0
NUM_BLOCKS = 320
KEPT_S = 4.0

_HERE = Path(__file__).resolve().parent
_CLASSES: dict[Mode, str] = {
    "push": "FaultyPushConnector",
    "pull": "FaultyPullConnector",
}
_ROLES: dict[Side, Role] = {"P": "kv_producer", "D": "kv_consumer"}


@dataclass(frozen=True)
class Seat:
    """What stays when the engine of one side is replaced by another."""

    side: Side
    ports: tuple[int, int]
    control: Control


class FaultPair:
    """A prefill and a decode engine without a router.

    Without a prefix cache every hand-off moves the whole prompt.

    Args:
        mode: who moves the KV.
        policy: what the decode engine does with a request whose KV did not come.
        log_dir: where engines write their logs and find their control files.
        keeping: whether they keep the KV of answers, for some seconds, and read it
            back.
    """

    def __init__(
        self, mode: Mode, policy: Policy, log_dir: Path, *, keeping: bool = False
    ) -> None:
        self.mode = mode
        self.policy = policy
        self.keeping = keeping
        self.engine_ids: dict[Side, str] = {"P": f"{mode}-P", "D": f"{mode}-D"}
        self.starts = 0
        self.log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self._seats: dict[Side, Seat] = {}
        self._engines: dict[Side, Engine] = {}
        for side in ("P", "D"):
            first, second = free_ports(2)
            control = Control(log_dir / f"{mode}-{side}-{first}.json")
            self._seats[side] = Seat(side, (first, second), control)

    @property
    def prefill(self) -> Engine:
        """The engine that prefills."""
        return self._engines["P"]

    @property
    def decode(self) -> Engine:
        """The engine that decodes."""
        return self._engines["D"]

    def engine(self, side: Side) -> Engine:
        """The engine of one side."""
        return self._engines[side]

    def control(self, side: Side) -> Control:
        """What goes wrong on one side."""
        return self._seats[side].control

    def start(self, *sides: Side) -> None:
        """Start an engine in each of these places; the ones before must be gone.

        Raises:
            StartError: one does not become ready.
        """
        started = time.monotonic()
        for side in sides:
            self.control(side).clear()
            self.starts += 1
            seat = self._seats[side]
            name = f"{self.starts:02d}-{self.engine_ids[side]}"
            engine = WarmEngine(
                name, self._config(seat), self.log_dir, ports=seat.ports
            )
            self._engines[side] = engine
            engine.start()
        wait_all_ready([self._engines[side] for side in sides], START_TIMEOUT_S)
        seconds = time.monotonic() - started
        print(f"\nstarted {self.mode} {' and '.join(sides)} in {seconds:.0f} s")

    def signal(self, side: Side, number: signal.Signals) -> None:
        """Send a signal to all processes of an engine."""
        self._engines[side].send_signal(number)

    def kill(self, side: Side) -> None:
        """End all processes of an engine at once."""
        self.signal(side, signal.SIGKILL)

    def reap(self, side: Side) -> None:
        """Collect what is left of an engine that was killed."""
        self._engines[side].stop(grace=0.0)

    def leave(self, side: Side) -> None:
        """Shut an engine down in the ordinary way."""
        self._engines[side].stop()

    def ready(self) -> bool:
        """Whether both engines run."""
        return len(self._engines) == 2 and all(
            engine.running for engine in self._engines.values()
        )

    def close(self) -> None:
        """Stop both."""
        stop_all(list(self._engines.values()))

    def _config(self, seat: Seat) -> EngineConfig:
        own = transfer_config(
            _CLASSES[self.mode],
            _ROLES[seat.side],
            engine_id=self.engine_ids[seat.side],
            extra_config={
                "peer_timeout": PEER_TIMEOUT_S,
                "handshake_timeout": HANDSHAKE_TIMEOUT_S,
                "kv_lease_duration": LEASE_S,
                "push_registration_timeout": REGISTRATION_TIMEOUT_S,
                "bidirectional_kv_xfer": self.keeping,
                "decoder_kv_blocks_ttl": KEPT_S,
            },
            kv_connector_module_path="faulty_connector",
            kv_load_failure_policy=self.policy,
        )
        path = os.pathsep.join(
            [str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        return replace(
            EngineConfig(
                model=str(tiny_model(SPEC)),
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                num_gpu_blocks=NUM_BLOCKS,
                prefix_caching=False,
            ),
            transfer_config=own,
            environment=MappingProxyType(
                {"PYTHONPATH": path, CONTROL_VARIABLE: str(seat.control.path)}
            ),
        )
