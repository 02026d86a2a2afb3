# SPDX-License-Identifier: Apache-2.0
"""Who has been heard of, and who owes an answer for too long."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..ids import AgentName


@dataclass
class _Watch:
    heard: float
    pinged: float


class Liveness:
    """Silence of peers.

    A peer is judged only while something is open with it: from then on, it is
    pinged after a third of ``timeout`` seconds of silence and lost after all of it.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._watched: dict[AgentName, _Watch] = {}

    def heard(self, peer: AgentName, now: float) -> None:
        """A message of ``peer`` has arrived."""
        watch = self._watched.get(peer)
        if watch is not None:
            watch.heard = now

    def excuse(self, now: float) -> None:
        """The silence until ``now`` was not the peers' fault."""
        for watch in self._watched.values():
            watch.heard = now

    def forget(self, peer: AgentName) -> None:
        """Stop judging ``peer``."""
        self._watched.pop(peer, None)

    def tick(
        self, owing: Iterable[AgentName], now: float
    ) -> tuple[list[AgentName], list[AgentName]]:
        """Returns the peers to ping and the peers that are lost."""
        owing = set(owing)
        for peer in set(self._watched) - owing:
            del self._watched[peer]
        ping: list[AgentName] = []
        lost: list[AgentName] = []
        for peer in owing:
            watch = self._watched.setdefault(peer, _Watch(heard=now, pinged=now))
            silence = now - watch.heard
            if silence > self._timeout:
                lost.append(peer)
                del self._watched[peer]
            elif min(silence, now - watch.pinged) > self._timeout / 3:
                watch.pinged = now
                ping.append(peer)
        return ping, lost
