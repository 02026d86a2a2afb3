# SPDX-License-Identifier: Apache-2.0
"""Which layers of a forward pass are done, in parts that are moved as one."""

from collections.abc import Iterator, Sequence

from ..layout import parts_of_regions
from ..wire.ranks import RegionInfo


class LayerParts:
    """The layers of one rank in ``parts`` parts, as a forward pass goes through them.

    A part is done when all its layers and all parts before it are, so that parts are
    told in their order.
    """

    def __init__(self, regions: Sequence[RegionInfo], parts: int) -> None:
        found = parts_of_regions(regions, parts)
        self.parts = 1 + max(found)
        self._part_of = {
            region.layer: part for region, part in zip(regions, found, strict=True)
        }
        self._missing: list[set[str]] = []
        self._next = self.parts

    def begin(self) -> None:
        """A forward pass begins."""
        self._missing = [set() for _ in range(self.parts)]
        for layer, part in self._part_of.items():
            self._missing[part].add(layer)
        self._next = 0

    def done(self, layer: str) -> Iterator[int]:
        """A layer has been computed; gives the parts that are done by that."""
        part = self._part_of.get(layer)
        if part is None or self._next == self.parts:
            return
        self._missing[part].discard(layer)
        while self._next < self.parts and not self._missing[self._next]:
            self._next += 1
            yield self._next - 1

    def rest(self) -> Iterator[int]:
        """The forward pass has ended; gives the parts that were not told."""
        while self._next < self.parts:
            self._next += 1
            yield self._next - 1
