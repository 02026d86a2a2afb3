# SPDX-License-Identifier: Apache-2.0
"""Starts engines and routers on this machine, for the demo and for tests.

    config = EngineConfig(model="/path/to/model")
    with pair("push", config, log_dir=Path("logs")) as servers:
        ...  # requests to servers.router.url

Every server writes its own log and is gone when the block is left, however that
happens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pd_processes import (
    LOOPBACK,
    Progress,
    ServerProcess,
    free_port_range,
    free_ports,
    stop_all,
    wait_all_ready,
)

Mode = Literal["push", "pull"]
Role = Literal["kv_producer", "kv_consumer", "kv_both"]
TransferConfig = dict[str, Any]

CONNECTORS: Mapping[Mode, str] = {
    "push": "NixlPushConnector",
    "pull": "NixlConnector",
}
ROUTER_SCRIPTS: Mapping[Mode, str] = {
    "push": "disagg_proxy_pushconnector_demo.py",
    "pull": "disagg_proxy_demo.py",
}
MULTITURN_SCRIPT = "disagg_proxy_multiturn.py"
START_TIMEOUT_S = 300.0
ROUTER_START_TIMEOUT_S = 60.0

# Two engines share few cores on a small machine; a value that the user has set
# for one of these wins.
_DEFAULT_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; sizes are in tokens.

    ``num_gpu_blocks`` limits the KV cache to so many blocks. ``adapters`` are LoRA
    adapters' folders by name. ``environment`` wins over the process's own. ``python``
    is the interpreter whose ``vllm`` serves.
    """

    model: str
    served_model_name: str = "model"
    block_size: int = 32
    max_model_len: int = 4096
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    dtype: str = "float32"
    enforce_eager: bool = True
    prefix_caching: bool = True
    num_gpu_blocks: int | None = None
    data_parallel_size: int = 1
    transfer_config: Mapping[str, Any] | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    extra_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    def arguments(self) -> list[str]:
        """Return the command-line arguments of ``vllm serve``."""
        arguments = [self.model]
        arguments += ["--served-model-name", self.served_model_name]
        arguments += ["--block-size", str(self.block_size)]
        arguments += ["--max-model-len", str(self.max_model_len)]
        arguments += ["--max-num-seqs", str(self.max_num_seqs)]
        arguments += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        arguments += ["--dtype", self.dtype]
        if self.enforce_eager:
            arguments.append("--enforce-eager")
        switch = "enable" if self.prefix_caching else "no-enable"
        arguments.append(f"--{switch}-prefix-caching")
        if self.num_gpu_blocks is not None:
            arguments += ["--num-gpu-blocks-override", str(self.num_gpu_blocks)]
        if self.transfer_config is not None:
            arguments += ["--kv-transfer-config", json.dumps(self.transfer_config)]
        if self.data_parallel_size > 1:
            arguments += ["--data-parallel-size", str(self.data_parallel_size)]
        if self.adapters:
            arguments += ["--enable-lora", "--lora-modules"]
            arguments += [f"{name}={path}" for name, path in self.adapters.items()]
        arguments += self.extra_arguments
        return arguments


def transfer_config(
    connector: str,
    role: Role,
    *,
    engine_id: str | None = None,
    extra_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TransferConfig:
    """Return what ``--kv-transfer-config`` takes.

    ``settings`` are further fields, for example ``kv_load_failure_policy``.
    """
    config: TransferConfig = {"kv_connector": connector, "kv_role": role, **settings}
    if engine_id is not None:
        config["engine_id"] = engine_id
    if extra_config:
        config["kv_connector_extra_config"] = dict(extra_config)
    return config


def nixl_transfer_config(mode: Mode, role: Role) -> TransferConfig:
    """Return the configuration of this project's connector for ``mode``."""
    return transfer_config(CONNECTORS[mode], role)


def bidirectional_transfer_config(mode: Mode, role: Role) -> TransferConfig:
    """Return the same for engines that keep and read back conversations."""
    extra_config = {"bidirectional_kv_xfer": True}
    return transfer_config(CONNECTORS[mode], role, extra_config=extra_config)


class Engine(ServerProcess):
    """One ``vllm serve`` process group on loopback.

    ``ports`` are those of HTTP and of the side channel; free ones by default.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        log_dir: Path,
        ports: tuple[int, int] | None = None,
    ) -> None:
        # Each data-parallel rank has a side channel of its own.
        port, self.side_channel_port = ports or (
            *free_ports(1),
            free_port_range(config.data_parallel_size),
        )
        self.config = config
        environment = {**_DEFAULT_ENVIRONMENT, **os.environ}
        # One host holds several engines, so these cannot come from the user.
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = LOOPBACK
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel_port)
        environment.update(config.environment)
        command = [config.python, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
        command += config.arguments()
        command += ["--host", LOOPBACK, "--port", str(port)]
        super().__init__(
            name,
            command,
            port=port,
            log_path=log_dir / f"{name}.log",
            environment=environment,
        )

    @property
    def side_channel(self) -> str:
        """``host:port`` of the side channel, which ``kv_integrity`` asks."""
        return f"{LOOPBACK}:{self.side_channel_port}"

    @property
    def ranks(self) -> list[tuple[str, int]]:
        """What routers call each data-parallel rank, and its side channel's port."""
        count = self.config.data_parallel_size
        if count == 1:
            return [(self.address, self.side_channel_port)]
        return [
            (f"{self.address}@{rank}", self.side_channel_port + rank)
            for rank in range(count)
        ]


def _side_channels(ranks: list[tuple[str, int]]) -> list[str]:
    return [f"{LOOPBACK}:{port}" for _, port in ranks]


class Router(ServerProcess):
    """One router process in front of prefill and decode engines.

    With ``multiturn`` it continues conversations.
    """

    def __init__(
        self,
        name: str,
        mode: Mode,
        prefill: list[Engine],
        decode: list[Engine],
        log_dir: Path,
        extra_arguments: tuple[str, ...] = (),
        *,
        multiturn: bool = False,
    ) -> None:
        (port,) = free_ports(1)
        self.mode = mode
        script = MULTITURN_SCRIPT if multiturn else ROUTER_SCRIPTS[mode]
        command = [sys.executable, str(Path(__file__).resolve().with_name(script))]
        command += ["--host", LOOPBACK, "--port", str(port)]
        if multiturn:
            command += ["--mode", mode]
        served = prefill[0].config
        command += ["--model", served.served_model_name]
        if served.adapters:
            command += ["--adapter", *served.adapters]
        sources = [rank for engine in prefill for rank in engine.ranks]
        sinks = [rank for engine in decode for rank in engine.ranks]
        command += ["--prefill", *(address for address, _ in sources)]
        command += ["--decode", *(address for address, _ in sinks)]
        if mode == "push":
            command += ["--prefill-kv-host", *(LOOPBACK for _ in sources)]
            ports = [str(port) for _, port in sources]
            command += ["--prefill-side-channel-port", *ports]
        else:
            command += ["--prefill-side-channel", *_side_channels(sources)]
        command += ["--decode-side-channel", *_side_channels(sinks)]
        command += extra_arguments
        super().__init__(
            name,
            command,
            port=port,
            log_path=log_dir / f"{name}.log",
            ready_path="/ready",
        )


@dataclass(frozen=True)
class Pair:
    """A prefill engine, a decode engine and the router in front of them."""

    prefill: Engine
    decode: Engine
    router: Router


@contextmanager
def single(
    config: EngineConfig,
    *,
    log_dir: Path,
    name: str = "single",
    start_timeout: float = START_TIMEOUT_S,
    progress: Progress | None = None,
) -> Iterator[Engine]:
    """Run one engine, ready for requests.

    Raises:
        StartError: it did not become ready within ``start_timeout`` seconds.
    """
    engine = Engine(name, config, log_dir)
    try:
        engine.start()
        engine.wait_ready(start_timeout, progress)
        yield engine
    finally:
        engine.stop()


@contextmanager
def pair(
    mode: Mode,
    config: EngineConfig,
    *,
    log_dir: Path,
    decode_config: EngineConfig | None = None,
    connector: Callable[[Mode, Role], TransferConfig] = nixl_transfer_config,
    router_arguments: tuple[str, ...] = (),
    multiturn: bool = False,
    engine_class: type[Engine] = Engine,
    start_timeout: float = START_TIMEOUT_S,
    progress: Progress | None = None,
) -> Iterator[Pair]:
    """Run a prefill engine, a decode engine and a router, ready for requests.

    ``connector`` gives each engine's transfer configuration from mode and role;
    ``decode_config`` lets the decode engine differ from the prefill engine.
    ``multiturn`` takes the router that continues conversations, which needs
    ``connector=bidirectional_transfer_config`` to be of use. ``engine_class`` starts
    the engines.

    Raises:
        StartError: a server did not become ready within ``start_timeout`` seconds.
    """
    prefill_config = replace(config, transfer_config=connector(mode, "kv_producer"))
    decode_config = replace(
        decode_config or config, transfer_config=connector(mode, "kv_consumer")
    )
    prefill = engine_class(f"{mode}-prefill", prefill_config, log_dir)
    decode = engine_class(f"{mode}-decode", decode_config, log_dir)
    router = Router(
        f"{mode}-router",
        mode,
        [prefill],
        [decode],
        log_dir,
        router_arguments,
        multiturn=multiturn,
    )
    try:
        prefill.start()
        decode.start()
        wait_all_ready([prefill, decode], start_timeout, progress)
        router.start()
        router.wait_ready(ROUTER_START_TIMEOUT_S, progress)
        yield Pair(prefill, decode, router)
    finally:
        # The router first: it must not meet engines that are already gone.
        try:
            router.stop()
        finally:
            stop_all([prefill, decode])
