"""GGUF files written here with known weights, read back, and unpacked to folders."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from foredraft.infer.gguf import dequantise_gguf, load_gguf

QUANTISED = gguf.GGMLQuantizationType.Q8_0
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def interleave_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of the query and key rows: rotary pairs side by side."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_names(num_layers: int) -> dict[str, str]:
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(num_layers):
        names |= {f"blk.{layer}.{k}": f"model.layers.{layer}.{v}" for k, v in LAYER_NAMES.items()}
    return names


def write_header(writer: gguf.GGUFWriter, model: LlamaForCausalLM, tokenizer_folder: Path) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer_folder: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    write_header(writer, model, tokenizer_folder)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    for short, long in gguf_names(model.config.num_hidden_layers).items():
        weight = weights[f"{long}.weight"]
        if short.endswith("attn_q"):
            weight = interleave_rotary(weight, model.config.num_attention_heads)
        if short.endswith("attn_k"):
            weight = interleave_rotary(weight, model.config.num_key_value_heads)
        if weight.ndim == 1:
            writer.add_tensor(f"{short}.weight", weight)
        else:
            writer.add_tensor(f"{short}.weight", quantize(weight, QUANTISED), raw_dtype=QUANTISED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, AutoModelForCausalLM.from_pretrained(tiny_target), tiny_target)
    return path


def test_load_expands_every_weight(tiny_gguf: Path, tiny_target: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(tiny_target).state_dict()
    found = load_gguf(tiny_gguf, torch.float32).state_dict()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        step = expected[name].abs().max().item() / 127
        torch.testing.assert_close(
            weight, expected[name], atol=step, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_unpacked_folder_is_the_same_model(tiny_gguf: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    dequantise_gguf(tiny_gguf, folder)
    unpacked = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert unpacked.dtype == torch.bfloat16
    assert getattr(unpacked.config, "quantization_config", None) is None
    loaded = load_gguf(tiny_gguf).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in unpacked.state_dict().items())
    messages = [{"role": "user", "content": "hi"}]
    tokenizers = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tiny_target)
    chats = [
        tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] for tokenizer in tokenizers
    ]
    assert chats[0] == chats[1]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    with pytest.raises(ValueError, match="exists already"):
        dequantise_gguf(tiny_gguf, folder)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no GGUF file at"):
        load_gguf(tmp_path / "absent.gguf")
    not_gguf = tmp_path / "not.gguf"
    not_gguf.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="expected it to begin with b'GGUF'"):
        load_gguf(not_gguf)
    with pytest.raises(ValueError):
        dequantise_gguf(not_gguf, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["not.gguf"]


def test_missing_packages_are_named(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'foredraft\[gguf\]'"):
        load_gguf(tiny_gguf)


@pytest.mark.slow
def test_unpacked_smollm2_answers(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
