# SPDX-License-Identifier: Apache-2.0
"""How the router deals with load and faults: settings and their flags."""

import argparse
from dataclasses import dataclass, field

from .breaker import BreakerSettings


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """All of it; the defaults are those of the command line."""

    breaker: BreakerSettings = field(default_factory=BreakerSettings)


def add_routing_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that :func:`routing_settings` reads."""
    default = RoutingSettings()
    group = parser.add_argument_group("load and faults")
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
    return RoutingSettings(
        breaker=BreakerSettings(args.breaker_failures, args.breaker_seconds)
    )


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
