# SPDX-License-Identifier: Apache-2.0
"""The compiled code for work per block and per token, where it is built and wanted.

``VLLM_NIXL_PLANNER`` chooses ``native`` or ``numpy`` (for digests: ``hashlib``) where
it is set. It is there for tests and benchmarks; the results are the same.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from vllm.logger import init_logger

from .wire.blocks import BlockArray

logger = init_logger(__name__)

VARIABLE = "VLLM_NIXL_PLANNER"
INTERFACE = 1
"""What the compiled module must say of itself, lest an older build is called."""

Table: TypeAlias = tuple[
    BlockArray, BlockArray, int, BlockArray, BlockArray, BlockArray
]
"""Local and remote ids, blocks per piece; room for the pairs and the runs per piece."""


class NativeError(ValueError):
    """A choice of implementation that cannot be met."""


class Compiled(Protocol):
    """The functions of ``csrc/nixl/module.cpp``.

    All raise TypeError, ValueError or OverflowError where arguments have not the form
    described. ``release_above`` is the number of entries above which the GIL is
    released.
    """

    INTERFACE: int

    def pair_tables(
        self,
        tables: list[Table],
        local_count: int,
        remote_count: int,
        release_above: int,
        /,
    ) -> tuple[int, bool, int, int] | None:
        """Fill the tables' outputs, or name what is out of range.

        The result is then the table's index, whether its remote ids are meant, and
        their lowest and highest.
        """

    def expand(
        self,
        ids: BlockArray,
        regions: BlockArray,
        pages: int,
        out: BlockArray,
        release_above: int,
        /,
    ) -> None:
        """Write ``regions[r] * pages + ids[i]`` to ``out``, region by region."""

    def token_digests(
        self, tokens: list[int], block: int, size: int, release_above: int, /
    ) -> bytes:
        """BLAKE2b of the tokens up to the end of each full block, as 64-bit words."""


@dataclass(frozen=True)
class Native:
    """The compiled functions, and how much they do before they release the GIL.

    A thread that gives the GIL up beside a busy one waits for up to the switch interval
    (5 ms) to get it back, so short work keeps it: what the limits allow takes up to
    0.1 ms, for tokens 0.6 ms.
    """

    compiled: Compiled
    pairs: int = 16_384
    indices: int = 131_072
    tokens: int = 32_768


def load(environ: Mapping[str, str] | None = None) -> Native | None:
    """The compiled code, or None where Python does the work.

    Raises:
        NativeError: the variable has an unknown value, or asks for what is not built.
    """
    wanted = (os.environ if environ is None else environ).get(VARIABLE, "")
    if wanted not in ("", "native", "numpy"):
        raise NativeError(
            f"{VARIABLE} is {wanted!r}, expected native or numpy. Correct or unset it."
        )
    if wanted == "numpy":
        return None
    try:
        found = importlib.import_module("._native", __package__)
        problem = (
            ""
            if getattr(found, "INTERFACE", None) == INTERFACE
            else f"{found.__file__} is of another version"
        )
    except ImportError as error:
        problem = str(error)
    if not problem:
        return Native(cast(Compiled, found))
    if wanted == "native":
        raise NativeError(
            f"{VARIABLE} is 'native', but the compiled planner cannot be used: "
            f"{problem}. Install the fork anew where there is a C++ compiler."
        )
    logger.warning("The compiled planner is not used, numpy plans instead: %s", problem)
    return None


NATIVE = load()
"""What this process uses."""
