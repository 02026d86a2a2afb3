# SPDX-License-Identifier: Apache-2.0
"""A tiny random model that hears: the tiny text model behind an audio encoder.

Sound has as much weight in a prompt as words have, so that an answer that is computed
from the KV of another sound is another answer.
"""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioEncoder,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from tiny_model import TinySpec, tiny_model

SAMPLE_RATE = 16000
AUDIO_TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
_ENCODER = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 80,
}
_DONE = "generation_config.json"


def tiny_audio(spec: TinySpec, folder: Path) -> Path:
    """Write the model into ``folder`` unless it is there, and return it."""
    if (folder / _DONE).is_file():
        return folder
    text = tiny_model(spec)
    tokenizer = Tokenizer.from_file(str(text / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in AUDIO_TOKENS])
    told = json.loads((text / "tokenizer_config.json").read_text(encoding="utf-8"))
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **told)
    heard = WhisperFeatureExtractor(feature_size=_ENCODER["num_mel_bins"])
    Qwen2AudioProcessor(heard, words).save_pretrained(folder)

    config = Qwen2AudioConfig(
        audio_config=_ENCODER,
        text_config=_text_config(text, spec),
        audio_token_index=spec.vocab + AUDIO_TOKENS.index("<|AUDIO|>"),
    )
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    save_file(
        {**_heard_weights(config, spec), **_text_weights(text, spec)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / _DONE).write_text(json.dumps({"eos_token_id": 2}), encoding="utf-8")
    return folder


def tone(hertz: float, seconds: float) -> str:
    """A ``data:`` URL of a sound."""
    times = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    samples = np.sin(2 * np.pi * hertz * times) * 0.5 * np.iinfo(np.int16).max
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype("<i2").tobytes())
    return "data:audio/wav;base64," + base64.b64encode(buffer.getvalue()).decode()


def _text_config(text: Path, spec: TinySpec) -> dict[str, object]:
    config = json.loads((text / "config.json").read_text(encoding="utf-8"))
    for key in ("architectures", "attention_bias", "mlp_bias"):
        del config[key]
    return {
        **config,
        "model_type": "qwen2",
        "vocab_size": spec.vocab + len(AUDIO_TOKENS),
    }


def _heard_weights(config: Qwen2AudioConfig, spec: TinySpec) -> dict[str, torch.Tensor]:
    """The encoder, and what makes words' embeddings of what it gives."""
    torch.manual_seed(spec.seed)
    encoder = Qwen2AudioEncoder(config.audio_config).state_dict()
    width = _ENCODER["d_model"]
    return {
        **{f"audio_tower.{name}": weight for name, weight in encoder.items()},
        "multi_modal_projector.linear.weight": torch.randn(spec.hidden, width)
        * width**-0.5,
        "multi_modal_projector.linear.bias": torch.zeros(spec.hidden),
    }


def _text_weights(text: Path, spec: TinySpec) -> dict[str, torch.Tensor]:
    weights = load_file(text / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = torch.zeros(len(AUDIO_TOKENS), spec.hidden)
        weights[name] = torch.cat([weights[name], more])
    for layer in range(spec.layers):
        at = f"model.layers.{layer}.self_attn"
        for part in "qkv":
            # The kind of model has biases, the text model has none.
            rows = weights[f"{at}.{part}_proj.weight"].shape[0]
            weights[f"{at}.{part}_proj.bias"] = torch.zeros(rows)
    return {f"language_model.{name}": weight for name, weight in weights.items()}
