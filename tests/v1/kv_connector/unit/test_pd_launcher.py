# SPDX-License-Identifier: Apache-2.0
"""The launcher on small real servers: start, readiness, and that all of it ends."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO

import pytest
import torch
from transformers import AutoModelForCausalLM

import pd_launcher
from pd_client import Ask, send
from pd_launcher import (
    Engine,
    EngineConfig,
    Router,
    bidirectional_transfer_config,
    nixl_transfer_config,
)
from pd_processes import (
    ServerProcess,
    Stage,
    StartError,
    free_ports,
    group_members,
    stop_all,
    wait_all_ready,
)
from pd_router.arguments import parse_args, parse_multiturn_args
from pd_router.config import Mode as RouterMode
from tiny_model import (
    as_text,
    random_prompt,
    tiny_model,
)

EXAMPLES = Path(pd_launcher.__file__).parent

# A server with a child, as an engine has. Arguments: port, seconds until it
# answers, and "deaf" where both ignore the request to end.
SERVER = """
import http.server, signal, subprocess, sys, time
port, delay, deaf = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "deaf"
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; time.sleep(600)"
if deaf:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", code])
print("(Server pid=1) INFO 01-01 00:00:00 [server.py:7] loading", flush=True)
time.sleep(delay)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

# A program that starts such a server and is then killed in some way.
PROGRAM = """
import sys, time
from pathlib import Path
from pd_processes import ServerProcess, free_ports
port, = free_ports(1)
command = [sys.executable, "-S", "-c", {server!r}, str(port), "0", sys.argv[1]]
server = ServerProcess("server", command, port=port, log_path=Path(sys.argv[2]))
server.start()
server.wait_ready(30)
print(server.pid, flush=True)
{then}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    made: list[ServerProcess] = []

    def make(delay: float = 0.0, kind: str = "polite") -> ServerProcess:
        (port,) = free_ports(1)
        name = f"server-{len(made)}"
        command = [sys.executable, "-S", "-c", SERVER, str(port), str(delay), kind]
        made.append(
            ServerProcess(name, command, port=port, log_path=tmp_path / f"{name}.log")
        )
        return made[-1]

    yield make
    stop_all(made, grace=0.0)


def wait_until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not so within the time allowed"
        time.sleep(0.05)


def test_servers_start_side_by_side_and_report_their_stage(
    server: Callable[..., ServerProcess],
) -> None:
    servers = [server(delay=0.5), server(delay=1.0)]
    for one in servers:
        one.start()
    reports: list[list[Stage]] = []
    wait_all_ready(servers, 30, lambda stages: reports.append(list(stages)))

    assert all(stage.ready for stage in reports[-1])
    assert [stage.name for stage in reports[-1]] == ["server-0", "server-1"]
    assert not all(stage.ready for stage in reports[0])
    assert reports[-1][0].text == "loading"
    stop_all(servers)
    assert [group_members(one.pid) for one in servers] == [[], []]


def test_a_server_that_ends_early_fails_at_once_with_its_log(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-S", "-c", "import sys; sys.exit('no such model')"]
    broken = ServerProcess("broken", command, port=port, log_path=tmp_path / "a.log")
    broken.start()
    started = time.monotonic()
    with pytest.raises(StartError, match=r"(?s)broken ended with status 1.*no such"):
        broken.wait_ready(60)
    assert time.monotonic() - started < 30
    broken.stop()


def test_a_server_that_is_late_fails_with_its_log(
    server: Callable[..., ServerProcess],
) -> None:
    late = server(delay=600)
    late.start()
    with pytest.raises(StartError, match="server-0 was not ready within 1 s"):
        late.wait_ready(1)


def test_stop_kills_a_group_that_does_not_listen(
    server: Callable[..., ServerProcess],
) -> None:
    deaf = server(kind="deaf")
    deaf.start()
    deaf.wait_ready(30)
    assert len(group_members(deaf.pid)) == 2
    deaf.stop(grace=0.5)
    assert group_members(deaf.pid) == []
    assert deaf.returncode == -signal.SIGKILL
    deaf.stop()


def test_stop_ends_a_stopped_server_and_an_orphaned_group(
    server: Callable[..., ServerProcess],
) -> None:
    stopped, headless = server(), server()
    for one in (stopped, headless):
        one.start()
    wait_all_ready([stopped, headless], 30)
    stopped.send_signal(signal.SIGSTOP)
    os.kill(headless.pid, signal.SIGKILL)
    wait_until(lambda: not headless.running)
    assert len(group_members(headless.pid)) == 1
    stop_all([stopped, headless])
    assert group_members(stopped.pid) == group_members(headless.pid) == []


@pytest.mark.parametrize("kind", ["polite", "deaf"])
@pytest.mark.parametrize("ending", ["killed", "terminated", "interrupted", "returned"])
def test_nothing_outlives_the_program(tmp_path: Path, ending: str, kind: str) -> None:
    then = "" if ending == "returned" else "time.sleep(600)"
    program = subprocess.Popen(
        [
            *(sys.executable, "-c", PROGRAM.format(server=SERVER, then=then)),
            *(kind, str(tmp_path / "server.log")),
        ],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    stdout: IO[bytes] | None = program.stdout
    assert stdout is not None
    group = int(stdout.readline())
    if ending != "returned":
        assert len(group_members(group)) == 2
        number = {
            "killed": signal.SIGKILL,
            "terminated": signal.SIGTERM,
            "interrupted": signal.SIGINT,
        }[ending]
        program.send_signal(number)
    program.wait(30)
    stdout.close()
    wait_until(lambda: group_members(group) == [])


def test_ports_are_free_and_not_given_twice() -> None:
    ports = free_ports(20) + free_ports(20)
    assert len(set(ports)) == 40


def test_engine_command_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    config = EngineConfig(
        model="/models/m",
        served_model_name="m",
        block_size=64,
        num_gpu_blocks=99,
        prefix_caching=False,
        transfer_config=nixl_transfer_config("push", "kv_producer"),
        extra_arguments=("--seed", "3"),
        environment={"VLLM_LOGGING_LEVEL": "DEBUG"},
    )
    engine = Engine("p", config, tmp_path)

    command = engine.command
    assert command[:5] == (
        *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main"),
        "serve",
    )
    given = dict(pairwise(command))
    assert given["serve"] == "/models/m"
    assert given["--block-size"] == "64"
    assert given["--num-gpu-blocks-override"] == "99"
    assert given["--seed"] == "3"
    assert given["--port"] == str(engine.port)
    assert "--no-enable-prefix-caching" in command
    assert json.loads(given["--kv-transfer-config"]) == {
        "kv_connector": "NixlPushConnector",
        "kv_role": "kv_producer",
    }
    environment = engine._environment
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert engine.side_channel == f"127.0.0.1:{engine.side_channel_port}"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(engine.side_channel_port)


@pytest.mark.parametrize("multiturn", [False, True])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_router_accepts_its_command_line(
    tmp_path: Path, mode: pd_launcher.Mode, multiturn: bool
) -> None:
    config = EngineConfig(model="/models/m", served_model_name="m")
    prefill, decode = (
        [Engine(f"{role}{index}", config, tmp_path) for index in range(2)]
        for role in ("p", "d")
    )
    router = Router("r", mode, prefill, decode, tmp_path, multiturn=multiturn)

    assert Path(router.command[1]).is_file()
    if multiturn:
        parsed = parse_multiturn_args(router.command[2:])
    else:
        parsed = parse_args(RouterMode(mode), router.command[2:])
    assert (parsed.mode, parsed.conversations is not None) == (mode, multiturn)
    assert parsed.port == router.port
    assert parsed.model == "m"
    addresses = [str(worker.address) for worker in parsed.workers]
    assert addresses == [engine.address for engine in (*prefill, *decode)]
    asked = [str(worker.report_address) for worker in parsed.workers]
    assert asked == [engine.side_channel for engine in (*prefill, *decode)]
    if mode == "push":
        ports = [
            worker.side_channel.port
            for worker in parsed.workers
            if worker.side_channel is not None
        ]
        assert ports == [engine.side_channel_port for engine in prefill]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_engines_of_conversations_are_told_to_keep_them(mode: pd_launcher.Mode) -> None:
    plain = nixl_transfer_config(mode, "kv_consumer")
    extra = {"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}
    assert bidirectional_transfer_config(mode, "kv_consumer") == {**plain, **extra}


@pytest.mark.distributed
def test_a_real_engine_answers_like_plain_transformers_and_ends(
    tmp_path: Path,
) -> None:
    directory = tiny_model()
    prompt = random_prompt(100, random.Random(4))
    model = AutoModelForCausalLM.from_pretrained(directory)
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=8
    )[0, len(prompt) :]
    ask = Ask("words", as_text(prompt), max_tokens=8)
    with pd_launcher.single(EngineConfig(str(directory)), log_dir=tmp_path) as engine:
        group = engine.pid
        members = group_members(group)
        answer = send(engine.host, engine.port, "model", ask, 120)
    assert len(members) >= 3
    assert group_members(group) == []
    assert answer.text.split() == as_text(expected.tolist()).split()
