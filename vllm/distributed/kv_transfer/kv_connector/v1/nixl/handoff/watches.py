# SPDX-License-Identifier: Apache-2.0
"""The decode side's requests that wait to be scheduled."""

from ..ids import TransferId


class Watches:
    """Hand-offs whose decode requests wait to be scheduled, by prefill engine.

    They have no blocks yet, so nothing can be registered; renewing them keeps
    the prefill engine from letting go of their KV meanwhile.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._waiting: dict[TransferId, tuple[tuple[str, int], int]] = {}
        self._next: float = 0.0

    def add(self, transfer_id: TransferId, address: tuple[str, int]) -> None:
        """One more decode request waits."""
        _, count = self._waiting.get(transfer_id, (address, 0))
        self._waiting[transfer_id] = (address, count + 1)

    def drop(self, transfer_id: TransferId) -> None:
        """One of them waits no more."""
        address, count = self._waiting.get(transfer_id, (("", 0), 0))
        if count > 1:
            self._waiting[transfer_id] = (address, count - 1)
        else:
            self._waiting.pop(transfer_id, None)

    def due(self, now: float) -> dict[tuple[str, int], tuple[TransferId, ...]]:
        """What to renew now, by address."""
        if now < self._next or not self._waiting:
            return {}
        self._next = now + self._interval
        grouped: dict[tuple[str, int], list[TransferId]] = {}
        for transfer_id, (address, _) in self._waiting.items():
            grouped.setdefault(address, []).append(transfer_id)
        return {address: tuple(ids) for address, ids in grouped.items()}

    def __len__(self) -> int:
        return len(self._waiting)
