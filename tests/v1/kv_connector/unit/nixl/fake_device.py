# SPDX-License-Identifier: Apache-2.0
"""A device beside the host, for what copies between them: other memory, and a stream.

What is launched on the stream is done when the test lets the stream go on; by default
at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import Fence


class FakeDevice:
    """The device, and what was copied to and from it.

    With ``held`` what is launched waits for :meth:`go_on`. A copy to the host is done
    when its operation returns, as it is on the platforms that there are.
    """

    def __init__(self) -> None:
        self.copied: list[tuple[str, str, tuple[int, ...]]] = []
        self.held = False
        self.failing: str | None = None
        self._launched: list[Callable[[], None]] = []
        self._done = 0
        self._entered = 0

    def copy(
        self,
        source: dict[str, torch.Tensor],
        target: dict[str, torch.Tensor],
        source_blocks: list[int],
        target_blocks: list[int],
        direction: Literal["h2d", "d2h"],
    ) -> None:
        """The engine's operation, as the base's: layers by name, blocks by number."""
        assert self._entered == 1, "not in the stream of copies"
        assert source_blocks == target_blocks
        if self.failing == direction:
            raise RuntimeError("the device has gone")
        for layer, pages in source.items():
            self.copied.append((direction, layer, tuple(source_blocks)))
            # As the platforms do it: what is copied is what is there now.
            taken = pages[source_blocks].clone()
            self._launch(self._put(target[layer], target_blocks, taken))
        if direction == "d2h":
            self.go_on()

    def record(self) -> Fence:
        """A fence behind what has been launched."""
        assert self._entered == 1, "not in the stream of copies"
        position = self._done + len(self._launched)
        return lambda: self._done >= position

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The stream of copies."""
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1

    def go_on(self) -> None:
        """Do what has been launched."""
        while self._launched:
            self._launched.pop(0)()
            self._done += 1

    def blocks(self, direction: str, layer: str) -> list[int]:
        """What was copied of a layer, in order."""
        return [
            block
            for way, name, blocks in self.copied
            if (way, name) == (direction, layer)
            for block in blocks
        ]

    def _launch(self, work: Callable[[], None]) -> None:
        self._launched.append(work)
        if not self.held:
            self.go_on()

    @staticmethod
    def _put(
        target: torch.Tensor, blocks: list[int], pages: torch.Tensor
    ) -> Callable[[], None]:
        def put() -> None:
            target[blocks] = pages

        return put
