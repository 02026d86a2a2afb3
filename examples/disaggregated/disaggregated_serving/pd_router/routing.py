# SPDX-License-Identifier: Apache-2.0
"""How the router deals with load and faults: settings and their flags."""

import argparse
from dataclasses import dataclass, field
from enum import StrEnum

from .breaker import BreakerSettings


class Balance(StrEnum):
    """What decides among workers."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """How workers are chosen.

    Attributes:
        max_load: under ``prefix``, how many times the average of running legs a
            worker may have, this one included, to be chosen for what it has cached.
        memory_tokens: tokens of prompts that are remembered for each worker.
    """

    by: Balance = Balance.REQUESTS
    max_load: float = 1.25
    memory_tokens: int = 1_000_000


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """All of it; the defaults are those of the command line.

    Attributes:
        skip_below: prompts of which decode has to compute fewer tokens than this are
            not prefilled elsewhere; 0 for none.
        rebind_after: seconds that decode may take in push once the prompt has been
            prefilled, before an engine that keeps nobody waiting is asked, too; 0 asks
            none.
    """

    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    skip_below: int = 0
    rebind_after: float = 0.0

    @property
    def remembers(self) -> bool:
        """Whether it is of use to know what workers have been given."""
        return self.balance.by is Balance.PREFIX or self.skip_below > 0


def add_routing_flags(parser: argparse.ArgumentParser, *, push: bool) -> None:
    """The flags that :func:`routing_settings` reads; some are for push alone."""
    default = RoutingSettings()
    group = parser.add_argument_group("load and faults")
    group.add_argument(
        "--balance",
        type=Balance,
        choices=list(Balance),
        default=default.balance.by,
        help="choose the engine with the fewest running requests, the fewest tokens to "
        "compute or to hold, or so that what it is known to have of the prompt does "
        "not count (prefix); %(default)s",
    )
    group.add_argument(
        "--prefix-max-load",
        type=_factor,
        default=default.balance.max_load,
        metavar="FACTOR",
        help="with --balance prefix: an engine is chosen for what it has only while it "
        "runs at most so many times the average of requests; %(default)s",
    )
    group.add_argument(
        "--prefix-memory",
        type=natural,
        default=default.balance.memory_tokens,
        metavar="TOKENS",
        help="tokens of prompts to remember for each engine, as many as its KV cache "
        "holds; %(default)s",
    )
    group.add_argument(
        "--skip-prefill-below",
        type=natural,
        default=default.skip_below,
        metavar="TOKENS",
        help="let decode compute a prompt itself that has fewer tokens than this, or "
        "fewer beyond what the decode engine has been given before; %(default)s",
    )
    if push:
        group.add_argument(
            "--rebind-after",
            type=_seconds,
            default=default.rebind_after,
            metavar="SECONDS",
            help="ask a decode engine that keeps nobody waiting, too, if the first one "
            "has not answered so long after prefill; the first answer is taken; 0 "
            "never; %(default)s",
        )
    group.add_argument(
        "--breaker-failures",
        type=natural,
        default=default.breaker.failures,
        metavar="N",
        help="failures in a row after which an engine is not chosen for a while; 0 "
        "never; %(default)s",
    )
    group.add_argument(
        "--breaker-seconds",
        type=positive_float,
        default=default.breaker.seconds,
        metavar="SECONDS",
        help="how long that is; doubled for each trial request that fails; %(default)s",
    )


def routing_settings(args: argparse.Namespace) -> RoutingSettings:
    """What the flags say."""
    default = RoutingSettings()
    return RoutingSettings(
        breaker=BreakerSettings(args.breaker_failures, args.breaker_seconds),
        balance=BalanceSettings(args.balance, args.prefix_max_load, args.prefix_memory),
        skip_below=args.skip_prefill_below,
        rebind_after=getattr(args, "rebind_after", default.rebind_after),
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return value


def _factor(text: str) -> float:
    value = positive_float(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def natural(text: str) -> int:
    """A whole number from 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return value
