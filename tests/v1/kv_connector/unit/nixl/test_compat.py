# SPDX-License-Identifier: Apache-2.0
"""Which ranks may exchange KV, and what a refusal says."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.compat import refusal
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    EngineId,
    Mode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    ProcessInfo,
    RankInfo,
    RegionInfo,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.facts import layout_facts

REGION = RegionInfo("l0", 0, 4096, 64, 64, 10, 0)
HERE = RankInfo(
    protocol=PROTOCOL_VERSION,
    engine_id=EngineId("here"),
    agent_name=AgentName("here:0"),
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    block_size=16,
    mem_type="DRAM",
    agent_metadata=b"metadata",
    regions=(REGION, msgspec.structs.replace(REGION, layer="l1")),
    compat={"model": "m", "vllm_version": "1"},
    layout={"connector_mode": "push", "dtype": "float32"},
    process=ProcessInfo("boot", 1, 2),
)


def _there(**changes: Any) -> RankInfo:
    return msgspec.structs.replace(HERE, **changes)


def _regions(**changes: Any) -> tuple[RegionInfo, ...]:
    return (REGION, msgspec.structs.replace(HERE.regions[1], **changes))


def test_equals_exchange_kv() -> None:
    there = _there(
        engine_id="there",
        agent_name="there:0",
        agent_metadata=b"other",
        process=ProcessInfo("", 0, 0),
        regions=tuple(
            msgspec.structs.replace(r, address=1, stride=999, num_blocks=77)
            for r in reversed(HERE.regions)
        ),
    )
    assert refusal(HERE, there, enforce=True) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"protocol": PROTOCOL_VERSION + 1},
            f"(local {PROTOCOL_VERSION}, remote {PROTOCOL_VERSION + 1})",
        ),
        ({"block_size": 32}, "l0: block sizes 16 (local) and 32 (remote) differ"),
        ({"block_size": 24}, "16 (local) and 24 (remote): one must be a multiple"),
        (
            {"layout": {"connector_mode": "pull", "dtype": "float32"}},
            "connector_mode differs (local push, remote pull)",
        ),
        (
            {"layout": {"connector_mode": "push"}},
            "dtype differs (local float32, remote absent)",
        ),
        ({"tp_size": 3, "regions": _regions(model_heads=4)}, "KV heads of layer l1"),
        ({"regions": _regions(heads=2)}, "l1 has 2 of 1 KV heads on a rank of 1"),
        ({"regions": ()}, "the remote rank has no KV cache"),
        ({"tp_rank": 1}, "tp_rank 1 of tp_size 1, which cannot be"),
        ({"tp_size": 2**30}, f"tp_rank 0 of tp_size {2**30}, which cannot be"),
        ({"pp_rank": -1}, "pp_rank -1 of pp_size 1, which cannot be"),
        ({"regions": (REGION,)}, "one side only: l1"),
        (
            {"regions": _regions(page_bytes=128)},
            "l1: page_bytes differs (local 64, remote 128)",
        ),
        ({"regions": _regions(group=1)}, "cache group of l1 differs"),
    ],
)
@pytest.mark.parametrize("enforce", [True, False])
def test_what_would_corrupt_is_refused_in_any_case(
    changes: dict[str, Any], said: str, enforce: bool
) -> None:
    assert said in (refusal(HERE, _there(**changes), enforce) or "")


def test_pages_packed_for_another_instruction_set_are_refused() -> None:
    def layout(isa: str) -> dict[str, str]:
        model = SimpleNamespace(
            dtype="float32",
            get_total_num_kv_heads=lambda: 1,
            get_head_size=lambda: 8,
            get_total_num_hidden_layers=lambda: 2,
        )
        layers = {"l0": SimpleNamespace(isa=isa), "other": object()}
        config = SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        )
        cache = SimpleNamespace(kv_cache_layout="LBHNC", transfer_groups=())
        return layout_facts(config, cache, Mode.PUSH)

    here = _there(layout=layout("amx"))
    same, other = _there(layout=layout("amx")), _there(layout=layout("vec"))
    assert refusal(here, same, enforce=False) is None
    said = refusal(here, other, enforce=False)
    assert said == "cpu_attention_isa differs (local amx, remote vec)"


def test_another_model_is_refused_unless_told_otherwise() -> None:
    there = _there(compat={"model": "n", "vllm_version": "1", "extra": "x"})
    said = refusal(HERE, there, enforce=True) or ""
    assert "model differs (local m, remote n)" in said
    assert "extra differs (local absent, remote x)" in said
    assert refusal(HERE, there, enforce=False) is None


def test_all_differences_are_named_at_once() -> None:
    there = _there(compat={"model": "n", "vllm_version": "2"}, block_size=8)
    said = refusal(HERE, there, enforce=True) or ""
    assert all(key in said for key in ("model", "vllm_version", "block sizes"))


def _with_cache_dtype(name: str, model_dtype: str = "bfloat16") -> RankInfo:
    layout = {**HERE.layout, "dtype": model_dtype, "cache_dtype": name}
    return _there(layout=layout)


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2"])
def test_equal_cache_dtypes_exchange_kv(name: str) -> None:
    same = _with_cache_dtype(name)
    assert refusal(same, _with_cache_dtype(name), enforce=False) is None


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (_with_cache_dtype("fp8"), "cache_dtype differs (local auto, remote fp8)"),
        (
            _with_cache_dtype("auto", "float16"),
            "dtype differs (local bfloat16, remote float16)",
        ),
    ],
)
def test_other_cache_dtypes_are_refused(theirs: RankInfo, said: str) -> None:
    """Also where pages are of the same length: their bytes would mean other numbers."""
    mine = _with_cache_dtype("auto")
    assert mine.regions == theirs.regions
    assert refusal(mine, theirs, enforce=False) == said
