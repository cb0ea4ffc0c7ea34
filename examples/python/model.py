"""The small model of examples/engine/model.hpp with its weights, and what it computes beside
attention, in NumPy."""

import numpy as np

LAYERS, VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 3, 128, 64, 128, 4, 2, 16


def random_weights(seed):
    random = np.random.RandomState(seed)  # the generator is std::mt19937

    def matrix(rows, cols, mean, spread):
        bits = random.randint(0, 2**32, (rows, cols), np.uint32)
        return np.float32(mean + spread * (bits * 2.0**-31 - 1))

    shapes = {"embedding": (VOCABULARY, HIDDEN, 0, 1.7), "head": (HIDDEN, VOCABULARY, 0, 0.9)}
    shapes["norm"] = (1, HIDDEN, 1, 0.2)
    for i in range(LAYERS):
        shapes[f"{i}.qkv"] = (HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE, 0, 0.35)
        shapes[f"{i}.out"] = (HEADS * SIZE, HIDDEN, 0, 0.5)
        shapes[f"{i}.gate_up"] = (HIDDEN, 2 * INNER, 0, 0.25)
        shapes[f"{i}.down"] = (INNER, HIDDEN, 0, 0.25)
        shapes[f"{i}.norm_1"] = shapes[f"{i}.norm_2"] = (1, HIDDEN, 1, 0.2)
    return {name: matrix(*shape) for name, shape in shapes.items()}


def random_prompt(count, own):
    bits = np.random.RandomState(2).randint(0, 2**32, count, np.uint32).astype(np.uint64)
    return ((bits + (np.arange(count) >= count - own)) % VOCABULARY).tolist()


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(1e-5)) * weight


def rope(heads, positions):
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))
    a, b, c, s = *np.split(heads, 2, 2), np.cos(angles), np.sin(angles)
    return np.concatenate((a * c - b * s, a * s + b * c), 2, dtype=np.float32)


def silu(x):
    return x / (1 + np.exp(-x))
