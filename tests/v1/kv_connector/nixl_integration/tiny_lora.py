# SPDX-License-Identifier: Apache-2.0
"""A random LoRA adapter for the tiny model, strong enough to change its answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tiny_model import TinySpec

RANK = 4


def tiny_lora(spec: TinySpec, folder: Path) -> Path:
    """Write the adapter into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(spec.seed + 1))
    wide = {"q_proj": spec.heads, "v_proj": spec.kv_heads}
    weights = {}
    for layer in range(spec.layers):
        for name, heads in wide.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = rng.standard_normal((RANK, spec.hidden)) * spec.hidden**-0.5
            up = rng.standard_normal((heads * spec.head_dim, RANK))
            weights[f"{at}.lora_A.weight"] = down.astype(np.float32)
            weights[f"{at}.lora_B.weight"] = up.astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(wide),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder
