# SPDX-License-Identifier: Apache-2.0
"""Measures the points of a sweep one after the other; ``run_sweep.sh`` calls it.

    python sweep.py plan …   prints how many points are still to be measured
    python sweep.py check …  says whether the engines are those that are meant
    python sweep.py run …    measures them
    python sweep.py model    makes the random model of DEVICE=cpu and prints where it is

A point is measured by ``vllm bench serve``. Its row is written when the engines have
been asked what they moved meanwhile; a point whose row is there and whole is not
measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sweep_rows
from sweep_points import (
    LABELS,
    Forecast,
    Point,
    PointError,
    duration,
    mode_of,
    points,
)
from sweep_proof import Address, Engine, Observer, ProofError, post, prove
from sweep_rows import RowError

_ROOT = Path(__file__).resolve().parents[2]
_WARM_UPS = 2
_LOG_TAIL_LINES = 15
_PERCENTILES = "50,90,99"
# Ids that are ordinary words in every vocabulary.
_WARM_UP_TOKENS = range(16, 1000)
_KIT_VOCABULARY = 16384


class SweepError(RuntimeError):
    """The sweep cannot go on; the text says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.what == "model":
        print(_cpu_model())
        return 0
    try:
        sweep = Sweep(options)
        if options.what == "plan":
            print(len(sweep.remaining))
            return 0
        return sweep.check() if options.what == "check" else sweep.run()
    except (PointError, RowError, ProofError, SweepError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2


class Sweep:
    """All points of one label.

    Raises:
        PointError, RowError, SweepError: the lists are wrong, or the folder holds
            rows of other settings.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: Path = options.results
        self._label: str = options.label
        self._mode = mode_of(options.label)
        self._all = points(
            options.qps, options.input_lens, options.output_lens, options.iterations
        )
        self._settings = _settings(options)
        self._forecast = Forecast(options.num_prompts)
        self.remaining = [point for point in self._all if not self._done(point)]

    def run(self) -> int:
        """Measure what remains; 1 if a point could not be measured or proven."""
        done = len(self._all) - len(self.remaining)
        arrivals = sum(map(self._forecast.arrivals, self.remaining))
        print(
            f"{self._label}: {len(self._all)} points, {done} of them measured already, "
            f"{duration(arrivals)} of arrivals left, rows in {self._folder}",
            flush=True,
        )
        if not self.remaining:
            return 0
        self._folder.mkdir(parents=True, exist_ok=True)
        observer = self._observer()
        self._check(observer)
        self._warm_up()
        failed = 0
        for place, point in enumerate(self.remaining):
            began = time.monotonic()
            text = self._measure(point, observer)
            self._forecast.note(point, time.monotonic() - began)
            failed += text is not None
            left = self._forecast.left(self.remaining[place + 1 :]) or 0.0
            print(
                f"[{done + place + 1}/{len(self._all)}] {point.name(self._label)}: "
                f"{text or self._shown(point)}; left: about {duration(left)}",
                flush=True,
            )
        return 1 if failed else 0

    def check(self) -> int:
        """Whether the engines are what the rows will say; 0, or an exception.

        Raises:
            ProofError: they are not.
        """
        self._check(self._observer())
        return 0

    def _check(self, observer: Observer) -> None:
        observer.check(caches=self._options.caches == "on")

    def _done(self, point: Point) -> bool:
        path = self._folder / f"{point.name(self._label)}.json"
        if not path.exists():
            return False
        row = sweep_rows.load(path)
        different = sweep_rows.differing_settings(row, self._settings)
        if different:
            raise SweepError(
                f"{path} was measured otherwise: {'; '.join(different)}. Choose "
                "another RESULTS_DIR, or the same settings as then"
            )
        return not sweep_rows.problems(row)

    def _measure(self, point: Point, observer: Observer) -> str | None:
        """Write one row; returns what went wrong, if anything."""
        before = observer.settled_before()
        client = self._bench(point)
        if isinstance(client, str):
            # Engines that are gone fail every further point, too.
            self._check(observer)
            return client
        after = observer.settled(before, client["completed"])
        path = sweep_rows.write(
            self._folder,
            self._label,
            point,
            client,
            self._settings,
            prove(self._mode, before, after, client),
        )
        found = sweep_rows.problems(sweep_rows.load(path))
        return f"NOT PROVEN: {'; '.join(map(str, found))}" if found else None

    def _bench(self, point: Point) -> dict[str, Any] | str:
        """What the load generator measured, or why it did not."""
        name = point.name(self._label)
        log = self._folder / f"{name}.log"
        result = self._folder / f"{name}.bench"
        command = self._command(point, result)
        limit = self._forecast.arrivals(point) * 2 + self._options.point_timeout
        with log.open("w", encoding="utf-8") as output:
            try:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
        try:
            if status == 0:
                found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
                return found
        finally:
            result.unlink(missing_ok=True)
        reason = f"status {status}"
        if status is None:
            reason = f"not done within {limit:.0f} s, raise POINT_TIMEOUT"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
        return f"FAILED ({reason}), log {log} ends:\n{tail}\n"

    def _command(self, point: Point, result: Path) -> list[str]:
        options = self._options
        ratio = {"input": point.input_len.ratio, "output": point.output_len.ratio}
        values: Mapping[str, Any] = {
            "backend": "openai",
            "base-url": options.base_url,
            "endpoint": "/v1/completions",
            "model": options.model,
            "served-model-name": options.served_model_name,
            "dataset-name": "random",
            "random-input-len": point.input_len.middle,
            "random-output-len": point.output_len.middle,
            "random-range-ratio": json.dumps(ratio),
            "random-prefix-len": options.prefix_len,
            "num-prompts": options.num_prompts,
            "request-rate": f"{point.qps:g}",
            "seed": point.seed,
            "temperature": 0,
            # Its test request would be the first prompt, which P then has cached.
            "ready-check-timeout-sec": 0,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": _PERCENTILES,
            "result-dir": result.parent,
            "result-filename": result.name,
        }
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main"]
        command += ["bench", "serve", "--save-result", "--disable-tqdm"]
        return command + [f"--{name}={value}" for name, value in values.items()]

    def _observer(self) -> Observer:
        options = self._options
        token = None
        if options.token_file:
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token

            token = Token.load(options.token_file)
        sys.path.append(str(_ROOT / "tools"))
        return Observer(
            self._mode,
            options.served_model_name,
            options.prefill,
            options.decode,
            token,
        )

    def _warm_up(self) -> None:
        longest = max(point.input_len.high for point in self._all)
        for number in range(_WARM_UPS):
            chosen = random.Random(f"warm-up {self._label} {time.time()} {number}")
            post(
                f"{self._options.base_url}/v1/completions",
                {
                    "model": self._options.served_model_name,
                    "prompt": chosen.choices(_WARM_UP_TOKENS, k=longest),
                    "max_tokens": 2,
                },
            )

    def _shown(self, point: Point) -> str:
        row = sweep_rows.load(self._folder / f"{point.name(self._label)}.json")
        proof = row.document["kit"]["proof"]
        text = (
            f"TTFT {row.value('ttft'):.0f} ms, TPOT {row.value('tpot'):.1f} ms, "
            f"{proof['achieved_rate']:.2f} of {point.qps:g} requests/s"
        )
        if self._mode == "single":
            return text
        return (
            f"{text}, {proof['requests_handed_over']} handed over, "
            f"{proof['bytes_transferred']:,} bytes"
        )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What rows of one folder must have in common."""
    return {
        "device": options.device,
        "model": options.model,
        "tp_size": options.tp_size,
        "num_prompts": options.num_prompts,
        "prefix_len": options.prefix_len,
        "caches": options.caches,
        "decode_engines": len(options.decode),
        "engine_options": options.engine_options.strip(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("model")
    for name in ("plan", "check", "run"):
        add = commands.add_parser(name).add_argument
        add("--label", choices=LABELS, required=True)
        add("--results", type=Path, required=True)
        add("--qps", required=True)
        add("--input-lens", required=True)
        add("--output-lens", required=True)
        add("--iterations", type=int, required=True)
        add("--num-prompts", type=_positive, required=True)
        add("--prefix-len", type=int, default=0)
        add("--device", choices=("cuda", "cpu"), required=True)
        add("--model", required=True)
        add("--served-model-name", required=True)
        add("--tp-size", type=_positive, required=True)
        add("--caches", choices=("off", "on"), required=True)
        add("--base-url", required=True, help="where requests are sent")
        add("--prefill", type=_engine, required=True, metavar="URL[,HOST:PORT]")
        add("--decode", type=_engine, action="append", default=[])
        add("--token-file")
        add("--engine-options", default="", help="kept in the rows, not used")
        add("--point-timeout", type=float, default=1800.0, metavar="SECONDS")
    return parser


def _engine(text: str) -> Engine:
    url, _, channel = text.partition(",")
    return Engine(url.rstrip("/"), _address(channel) if channel else None)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _cpu_model() -> Path:
    sys.path.append(str(_ROOT / "tests/v1/kv_connector/nixl_integration"))
    from tiny_model import TinySpec, tiny_model

    # The load generator's prompts are runs of consecutive ids, so few of them would
    # be different ones in a small vocabulary.
    return tiny_model(TinySpec(vocab=_KIT_VOCABULARY))


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
