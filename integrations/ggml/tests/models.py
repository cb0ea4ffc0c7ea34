"""Small models of random weights for llama.cpp, one GGUF file each.

usage: models.py FOLDER
"""

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

EMBEDDING, HEADS, KV_HEADS, HEAD, FEED_FORWARD, EXPERTS = 128, 8, 2, 32, 256, 4
TOKENS = [b"<unk>", b"<s>", b"</s>"]
TOKENS += [f"<0x{byte:02X}>".encode() for byte in range(256)]
TOKENS += [f"t{number}".encode() for number in range(512 - len(TOKENS))]
WINDOW = 96


class Model:
    """A GGUF file under construction."""

    def __init__(self, folder: Path, name: str, architecture: str, layers: int) -> None:
        self.layers = layers
        self.random = np.random.default_rng(len(name))
        self.writer = gguf.GGUFWriter(folder / f"{name}.gguf", architecture)
        writer = self.writer
        writer.add_context_length(8192)
        writer.add_embedding_length(EMBEDDING)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(HEADS if architecture == "bloom" else KV_HEADS)
        if architecture != "bloom":
            writer.add_key_length(HEAD)
            writer.add_value_length(HEAD)
            writer.add_rope_dimension_count(HEAD)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(len(TOKENS))
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_scores([0.0] * len(TOKENS))
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(TOKENS) - 259))
        self.matrix("token_embd", len(TOKENS), EMBEDDING)
        self.ones("output_norm", EMBEDDING)
        if architecture != "gemma2":
            self.matrix("output", len(TOKENS), EMBEDDING)

    def matrix(self, name: str, *shape: int) -> None:
        values = self.random.standard_normal(shape, dtype=np.float32)
        self.writer.add_tensor(f"{name}.weight", values * (2 / float(shape[-1]) ** 0.5))

    def ones(self, name: str, size: int) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    def bias(self, name: str, *shape: int) -> None:
        values = self.random.standard_normal(shape, dtype=np.float32)
        self.writer.add_tensor(f"{name}.bias", values / 10)

    def attention(self, layer: str) -> None:
        self.ones(f"{layer}.attn_norm", EMBEDDING)
        self.matrix(f"{layer}.attn_q", HEADS * HEAD, EMBEDDING)
        self.matrix(f"{layer}.attn_k", KV_HEADS * HEAD, EMBEDDING)
        self.matrix(f"{layer}.attn_v", KV_HEADS * HEAD, EMBEDDING)
        self.matrix(f"{layer}.attn_output", EMBEDDING, HEADS * HEAD)

    def feed_forward(self, layer: str) -> None:
        self.ones(f"{layer}.ffn_norm", EMBEDDING)
        for name in ("gate", "up"):
            self.matrix(f"{layer}.ffn_{name}", FEED_FORWARD, EMBEDDING)
        self.matrix(f"{layer}.ffn_down", EMBEDDING, FEED_FORWARD)

    def save(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def llama(model: Model, layer: str) -> None:
    model.attention(layer)
    model.feed_forward(layer)


def qwen3(model: Model, layer: str) -> None:
    llama(model, layer)
    model.ones(f"{layer}.attn_q_norm", HEAD)
    model.ones(f"{layer}.attn_k_norm", HEAD)


def gemma2(model: Model, layer: str) -> None:
    llama(model, layer)
    model.ones(f"{layer}.post_attention_norm", EMBEDDING)
    model.ones(f"{layer}.post_ffw_norm", EMBEDDING)


def gemma3(model: Model, layer: str) -> None:
    gemma2(model, layer)
    model.ones(f"{layer}.attn_q_norm", HEAD)
    model.ones(f"{layer}.attn_k_norm", HEAD)


def gpt_oss(model: Model, layer: str) -> None:
    model.attention(layer)
    model.bias(f"{layer}.attn_output", EMBEDDING)
    model.matrix(f"{layer}.attn_sinks", HEADS)
    model.ones(f"{layer}.post_attention_norm", EMBEDDING)
    model.matrix(f"{layer}.ffn_gate_inp", EXPERTS, EMBEDDING)
    model.bias(f"{layer}.ffn_gate_inp", EXPERTS)
    for name in ("gate", "up"):
        model.matrix(f"{layer}.ffn_{name}_exps", EXPERTS, FEED_FORWARD, EMBEDDING)
        model.bias(f"{layer}.ffn_{name}_exps", EXPERTS, FEED_FORWARD)
    model.matrix(f"{layer}.ffn_down_exps", EXPERTS, EMBEDDING, FEED_FORWARD)
    model.bias(f"{layer}.ffn_down_exps", EXPERTS, EMBEDDING)


def bloom(model: Model, layer: str) -> None:
    sizes = {"attn_qkv": (3 * EMBEDDING, EMBEDDING), "attn_output": (EMBEDDING, EMBEDDING)}
    sizes |= {"ffn_up": (FEED_FORWARD, EMBEDDING), "ffn_down": (EMBEDDING, FEED_FORWARD)}
    for name, shape in sizes.items():
        model.matrix(f"{layer}.{name}", *shape)
        model.bias(f"{layer}.{name}", shape[0])
    for name in ("attn_norm", "ffn_norm"):
        model.ones(f"{layer}.{name}", EMBEDDING)
        model.bias(f"{layer}.{name}", EMBEDDING)


def write(folder: Path, name: str, layers: int, block: Callable[[Model, str], None]) -> None:
    model = Model(folder, name, name, layers)
    if name in ("gemma2", "gemma3", "gpt-oss"):
        model.writer.add_sliding_window(WINDOW)
    if name == "gemma2":
        model.writer.add_attn_logit_softcapping(5.0)
        model.writer.add_final_logit_softcapping(30.0)
    if name == "gpt-oss":
        model.writer.add_expert_count(EXPERTS)
        model.writer.add_expert_used_count(2)
        model.writer.add_expert_feed_forward_length(FEED_FORWARD)
    if name == "bloom":
        model.writer.add_layer_norm_eps(1e-5)
        model.ones("token_embd_norm", EMBEDDING)
        model.bias("token_embd_norm", EMBEDDING)
        model.bias("output_norm", EMBEDDING)
    for layer in range(layers):
        block(model, f"blk.{layer}")
    model.save()


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, "llama", 2, llama)
    write(folder, "qwen3", 2, qwen3)
    write(folder, "gemma2", 2, gemma2)
    write(folder, "gemma3", 6, gemma3)
    write(folder, "gpt-oss", 2, gpt_oss)
    write(folder, "bloom", 2, bloom)


if __name__ == "__main__":
    main()
