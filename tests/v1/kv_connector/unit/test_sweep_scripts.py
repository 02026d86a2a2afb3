# SPDX-License-Identifier: Apache-2.0
"""The kit's shell scripts: what they would start, refuse, and end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit_processes
import kit_transfer_config
import sweep_rows
from pd_processes import free_ports
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConnectorConfig

KIT = Path(sweep_rows.__file__).parent
PORTS = (
    "PREFILL_PORT",
    "DECODE_PORT",
    "PREFILL_SIDE_CHANNEL_PORT",
    "DECODE_SIDE_CHANNEL_PORT",
    "PROXY_PORT",
)
TIMEOUT_S = 60.0
P5EN = {"PREFILL_IP": "10.0.0.1", "DECODE_IP": "10.0.0.2"}
CONNECTORS = {
    "push": "NixlPushConnector",
    "pull": "NixlConnector",
    "pull-inline": "NixlConnector",
}


def environment(folder: Path, **settings: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHON": sys.executable,
        "STATE_DIR": str(folder / "state"),
        "LOG_DIR": str(folder / "logs"),
        "RESULTS_DIR": str(folder / "results"),
        **settings,
    }


def run(
    script: str, folder: Path, *arguments: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(KIT / script), *arguments],
        env=environment(folder, **settings),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def would_serve(folder: Path, **settings: str) -> list[str]:
    done = run("serve_pd.sh", folder, DRY_RUN="1", **settings)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return words[words.index(sys.executable) :]


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


# ---- serve_pd.sh


@pytest.mark.parametrize("mode", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_on_p5en_it_serves_as_published(tmp_path: Path, role: str, mode: str) -> None:
    command = would_serve(tmp_path, ROLE=role, MODE=mode, **P5EN)

    assert command[:5] == [
        sys.executable,
        "-P",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
    ]
    assert command[5] == "Qwen/Qwen3-32B"
    for option, expected in (
        ("--served-model-name", "Qwen"),
        ("--dtype", "bfloat16"),
        ("--tensor-parallel-size", "8"),
        ("--max-model-len", "32768"),
        ("--max-num-seqs", "8"),
        ("--port", "8100" if role == "prefill" else "8200"),
    ):
        assert value(command, option) == expected
    # Off on D only.
    assert ("--no-enable-prefix-caching" in command) is (role == "decode")
    transfer = KVTransferConfig(**json.loads(value(command, "--kv-transfer-config")))
    assert transfer.kv_connector == CONNECTORS[mode]
    assert transfer.kv_buffer_device == "cuda"
    assert transfer.engine_id == f"{role}-engine-001"
    assert transfer.is_kv_producer is (role == "prefill")
    config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
    assert config.backends == ("LIBFABRIC",)
    assert config.transfer_thread is (mode != "pull-inline")


def test_only_the_connector_differs_between_push_and_pull(tmp_path: Path) -> None:
    texts = {
        mode: " ".join(would_serve(tmp_path, ROLE="decode", MODE=mode, **P5EN))
        for mode in ("push", "pull")
    }
    replaced = texts["push"].replace(CONNECTORS["push"], CONNECTORS["pull"])
    assert replaced == texts["pull"]


def test_the_printed_command_needs_nothing_else(tmp_path: Path) -> None:
    done = run("serve_pd.sh", tmp_path, DRY_RUN="1", ROLE="decode", MODE="push", **P5EN)

    variables = shlex.split(done.stdout.partition(sys.executable)[0])
    assert f"VLLM_NIXL_SIDE_CHANNEL_HOST={P5EN['DECODE_IP']}" in variables
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5600" in variables


def test_on_cpu_it_serves_the_random_model(tmp_path: Path) -> None:
    command = would_serve(
        tmp_path,
        ROLE="decode",
        MODE="push",
        DEVICE="cpu",
        CACHES="on",
        ENGINE_NUMBER="2",
        EXTRA_CONFIG='{"num_threads": 2, "backends": ["UCX"]}',
        EXTRA_ARGS="--seed 3",
    )

    assert (Path(command[5]) / "config.json").is_file()
    assert "--enforce-eager" in command
    assert "--enable-prefix-caching" in command
    assert command[-2:] == ["--seed", "3"]
    assert value(command, "--host") == "127.0.0.1"
    transfer = json.loads(value(command, "--kv-transfer-config"))
    assert transfer["engine_id"] == "decode-engine-002"
    assert transfer["kv_connector_extra_config"]["num_threads"] == 2


def test_a_single_engine_has_no_connector(tmp_path: Path) -> None:
    command = would_serve(tmp_path, ROLE="single", MODE="single", **P5EN)
    assert "--kv-transfer-config" not in command
    assert value(command, "--port") == "8100"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "ROLE is ''"),
        ({"ROLE": "both", "MODE": "push"}, "ROLE is 'both'"),
        ({"ROLE": "prefill", "MODE": "shove"}, "MODE is 'shove' for ROLE prefill"),
        ({"ROLE": "single", "MODE": "push"}, "MODE is 'push' for ROLE single"),
        ({"ROLE": "prefill", "MODE": "push"}, "PREFILL_IP is not set"),
        ({"ROLE": "decode", "MODE": "push"}, "DECODE_IP is not set"),
        ({"ROLE": "decode", "DEVICE": "tpu"}, "DEVICE is 'tpu'"),
        ({"ROLE": "decode", "CACHES": "some"}, "CACHES is 'some'"),
        (
            {"ROLE": "decode", "MODE": "push", "ENGINE_NUMBER": "0", **P5EN},
            "ENGINE_NUMBER is '0'",
        ),
        (
            {"ROLE": "decode", "MODE": "push", "EXTRA_CONFIG": "[1]", **P5EN},
            "EXTRA_CONFIG is '[1]'",
        ),
    ],
)
def test_serve_pd_names_what_is_wrong(
    tmp_path: Path, settings: dict[str, str], named: str
) -> None:
    done = run("serve_pd.sh", tmp_path, DRY_RUN="1", **settings)
    assert done.returncode == 2
    assert named in done.stderr


def test_extra_config_wins() -> None:
    made = kit_transfer_config.transfer_config(
        "c", "kv_both", "e", "cpu", ["A"], extra={"backends": ["B"]}
    )
    assert made["kv_connector_extra_config"] == {"backends": ["B"]}


# ---- run_sweep.sh and cleanup.sh


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "MODE is ''"),
        ({"MODE": "both"}, "MODE is 'both'"),
        ({"MODE": "push"}, "PREFILL_IP is not set"),
        ({"MODE": "push", "PREFILL_IP": "10.0.0.1"}, "DECODE_IP is not set"),
        ({"MODE": "three-way", **P5EN}, "START_SERVERS is 0"),
        ({"MODE": "push", "VLLM_SRC": "/nowhere", **P5EN}, "VLLM_SRC is '/nowhere'"),
        ({"MODE": "push", "QPS_LIST": "fast", **P5EN}, "QPS_LIST holds 'fast'"),
    ],
)
def test_run_sweep_names_what_is_wrong(
    tmp_path: Path, settings: dict[str, str], named: str
) -> None:
    done = run("run_sweep.sh", tmp_path, **settings)
    assert done.returncode == 2
    assert named in done.stderr


def test_cleanup_ends_nothing_where_nothing_was_started(tmp_path: Path) -> None:
    for what in ("server", "proxy"):
        done = run("cleanup.sh", tmp_path, what)
        assert done.returncode == 0
        assert "nothing to end" in done.stdout
    assert run("cleanup.sh", tmp_path, "everything").returncode == 2
    assert run("cleanup.sh", tmp_path).returncode == 2


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings with which an "engine" sleeps instead of serving."""
    python = tmp_path / "python"
    lines = (
        "#!/usr/bin/env bash",
        'case "$2 $3 $4" in',
        "  '-m vllm.entrypoints.cli.main serve') exec sleep 600 ;;",
        f'  *) exec {shlex.quote(sys.executable)} "$@" ;;',
        "esac",
    )
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    ports = map(str, free_ports(5))
    yield {
        "DEVICE": "cpu",
        "NO_LOCK": "1",
        "PYTHON": str(python),
        **dict(zip(PORTS, ports, strict=True)),
    }
    state = tmp_path / "state"
    for record in kit_processes.records(state):
        kit_processes.stop(record, state, grace=0.0)


def records(folder: Path, count: int) -> list[kit_processes.Record]:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        found = kit_processes.records(folder / "state")
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_sweep_ends_what_it_has_started(
    tmp_path: Path, stage: dict[str, str], number: signal.Signals
) -> None:
    running = subprocess.Popen(
        [str(KIT / "run_sweep.sh")],
        env=environment(tmp_path, MODE="push", **stage),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        started = records(tmp_path, 2)
        assert all(record.running() for record in started)

        running.send_signal(number)

        assert running.wait(TIMEOUT_S) == 128 + number
    finally:
        running.kill()
    assert not any(record.members() for record in started)
    assert records(tmp_path, 0) == []


def test_a_sweep_leaves_alone_what_it_did_not_start(
    tmp_path: Path, stage: dict[str, str]
) -> None:
    state = tmp_path / "state"
    other = kit_processes.start("prefill", ["sleep", "600"], tmp_path / "log", state)

    done = run("run_sweep.sh", tmp_path, MODE="push", START_TIMEOUT="2", **stage)

    assert done.returncode == 1
    assert "prefill runs already" in done.stderr
    assert "decode did not answer" in done.stderr
    assert [record.name for record in kit_processes.records(state)] == ["prefill"]
    assert other.running()
    # cleanup.sh is for what runs of the kit have left.
    done = run("cleanup.sh", tmp_path, "server")
    assert done.stdout == "prefill: ended\n"
    assert not other.running()


def test_engines_that_are_not_there_are_named_before_a_proxy_is_started(
    tmp_path: Path, stage: dict[str, str]
) -> None:
    done = run("run_sweep.sh", tmp_path, MODE="pull", START_SERVERS="0", **stage)
    assert done.returncode == 2
    assert f":{stage['PREFILL_PORT']}/health did not answer" in done.stderr
    assert "proxy" not in done.stdout
