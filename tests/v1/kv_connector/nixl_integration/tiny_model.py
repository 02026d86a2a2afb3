# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama whose greedy answers depend on the whole prompt.

The distributed tests compare engines token for token, so the model must be
decisive (the best logit leads by much more than float32 noise) and must look at
its whole context (a wrong KV block changes the answer). Plain random weights do
neither: their attention averages the context away. Sharp attention (large query
and key weights) and a strong attention branch give both.

The tokenizer is trivial: token ``i`` is the word ``w<i>``, words are separated
by blanks, and ids below ``FIRST_WORD`` are special and never generated.

Run as a script, it prints the directory of the model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SPECIAL_TOKENS = ("<unk>", "<pad>", "<eos>")
FIRST_WORD = len(SPECIAL_TOKENS)
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# Part of the cache key: raise it when the recipe below changes.
_RECIPE = 2


@dataclass(frozen=True)
class TinySpec:
    """What the model is made of.

    ``sharpness`` is the standard deviation of attention scores, ``attention``
    and ``mlp`` weigh the two branches against the embedding, and ``logit_std``
    is the standard deviation of the logits.
    """

    seed: int = 0
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    # The CPU attention backend accepts 32, 64, 80, 96, 112, 128 and larger ones.
    head_dim: int = 32
    intermediate: int = 512
    vocab: int = 1024
    max_positions: int = 8192
    sharpness: float = 3.5
    attention: float = 2.0
    mlp: float = 0.5
    logit_std: float = 4.0
    # Of two layers, one looks at so many tokens at most; 0: all look at all.
    window: int = 0

    def key(self) -> str:
        """Return a short name that is different for every specification."""
        text = json.dumps([_RECIPE, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def default_folder() -> Path:
    """Return the folder in which models are kept between test runs."""
    chosen = os.environ.get("KVFORK_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser() / "tiny"
    return Path(tempfile.gettempdir()) / f"vllm-kv-fork-tiny-{os.getuid()}"


def tiny_model(spec: TinySpec | None = None, folder: Path | None = None) -> Path:
    """Return the directory of the model of ``spec``, making it if missing."""
    chosen = spec or TinySpec()
    root = default_folder() if folder is None else folder
    target = root / f"tiny-llama-{chosen.key()}"
    if _complete(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
    try:
        _write_model(chosen, made)
        # Two test processes may build at the same time; either result will do.
        if target.exists() and not _complete(target):
            shutil.rmtree(target)
        try:
            made.rename(target)
        except OSError:
            if not _complete(target):
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def random_prompt(
    length: int, rng: random.Random, spec: TinySpec | None = None
) -> list[int]:
    """Return ``length`` random word ids."""
    vocab = (spec or TinySpec()).vocab
    return [rng.randrange(FIRST_WORD, vocab) for _ in range(length)]


def as_text(tokens: list[int]) -> str:
    """Return the text that the tokenizer turns into exactly ``tokens``."""
    return " ".join(_word(token) for token in tokens)


def _complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in MODEL_FILES)


def _word(token: int) -> str:
    return SPECIAL_TOKENS[token] if token < FIRST_WORD else f"w{token}"


def _write_model(spec: TinySpec, directory: Path) -> None:
    from safetensors.numpy import save_file

    _write_json(directory / "config.json", _config(spec))
    # No sampling parameters: the server would take them as its defaults.
    _write_json(directory / "generation_config.json", {"eos_token_id": 2})
    _write_tokenizer(spec, directory)
    save_file(
        dict(_weights(spec)),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def _config(spec: TinySpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_positions,
        "mlp_bias": False,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab,
        **(_windows(spec) if spec.window else {}),
    }


def _windows(spec: TinySpec) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "layer_types": [kinds[layer % 2] for layer in range(spec.layers)],
        "sliding_window": spec.window,
    }


def _weights(spec: TinySpec) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    rng = np.random.Generator(np.random.PCG64(spec.seed))
    hidden, wide = spec.hidden, spec.intermediate
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def normal(rows: int, columns: int, scale: float) -> npt.NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    def projection(
        rows: int, columns: int, gain: float = 1.0
    ) -> npt.NDArray[np.float32]:
        return normal(rows, columns, gain * columns**-0.5)

    ones = np.ones(hidden, dtype=np.float32)
    yield "model.embed_tokens.weight", normal(spec.vocab, hidden, 1.0)
    # A score is a product of a query and a key: each gets the square root.
    sharp = spec.sharpness**0.5
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", ones.copy()
        yield f"{at}.self_attn.q_proj.weight", projection(queries, hidden, sharp)
        yield f"{at}.self_attn.k_proj.weight", projection(keys, hidden, sharp)
        yield f"{at}.self_attn.v_proj.weight", projection(keys, hidden)
        yield (
            f"{at}.self_attn.o_proj.weight",
            projection(hidden, queries, spec.attention),
        )
        yield f"{at}.post_attention_layernorm.weight", ones.copy()
        yield f"{at}.mlp.gate_proj.weight", projection(wide, hidden)
        yield f"{at}.mlp.up_proj.weight", projection(wide, hidden)
        yield f"{at}.mlp.down_proj.weight", projection(hidden, wide, spec.mlp)
    yield "model.norm.weight", ones.copy()
    head = projection(spec.vocab, hidden, spec.logit_std)
    # A special token has the logit 0 and so never wins: answers end by length.
    head[:FIRST_WORD] = 0
    yield "lm_head.weight", head


def _write_tokenizer(spec: TinySpec, directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    unknown, padding, end = SPECIAL_TOKENS
    words = {_word(token): token for token in range(spec.vocab)}
    tokenizer = Tokenizer(WordLevel(vocab=words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": unknown,
            "pad_token": padding,
            "eos_token": end,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for message in messages %}{{ message['content'] }} "
            "{% endfor %}",
            "model_max_length": spec.max_positions,
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Build the default model and print its directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=TinySpec.seed)
    parser.add_argument("--folder", type=Path, help="where to keep the model")
    arguments = parser.parse_args(argv)
    print(tiny_model(TinySpec(seed=arguments.seed), arguments.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
