"""Attention in plain NumPy and double precision, and the element types that NumPy does not have.

Shares nothing with the library: it is what the library is compared with.
"""

from dataclasses import dataclass, field

import numpy as np

#: NumPy's type for the bytes of each element type.
STORAGE = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "fp8_e4m3": np.uint8,
    "fp8_e5m2": np.uint8,
    "int8": np.int8,
}
#: Largest relative error of rounding to a type once.
ROUNDOFF = {
    "f32": 2.0**-24,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8_e4m3": 2.0**-4,
    "fp8_e5m2": 2.0**-3,
}


def _fp8_values(exponent_bits: int) -> np.ndarray:
    """The number that each of the 256 bytes stands for."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (code & (2**mantissa_bits - 1)) / 2.0**mantissa_bits
    magnitude = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    if exponent_bits == 4:  # e4m3 has no infinities, and one NaN of each sign
        magnitude[(code & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 2**exponent_bits - 1
        magnitude[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return np.where(code >= 128, -magnitude, magnitude)


_FP8 = {"fp8_e4m3": _fp8_values(4), "fp8_e5m2": _fp8_values(5)}


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as f32, f16 or bf16 (its bits), rounded to nearest even."""
    if dtype != "bf16":
        return values.astype(STORAGE[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """What stored elements stand for, before any scale."""
    if dtype in _FP8:
        return _FP8[dtype][stored]
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


@dataclass
class Options:
    """What changes a logit or hides a key; AttentionConfig's names."""

    scale: float
    causal: bool = True
    logits_soft_cap: float = 0
    sliding_window: int = 0
    attention_chunk_size: int = 0
    alibi_slopes: list[float] = field(default_factory=list)
    sinks: list[float] = field(default_factory=list)


def _visible(positions: np.ndarray, keys: np.ndarray, options: Options) -> np.ndarray:
    distance = positions[:, None] - keys[None, :]
    seen = np.ones(distance.shape, bool)
    if options.causal:
        seen &= distance >= 0
    if options.sliding_window:
        seen &= np.abs(distance) < options.sliding_window
    if options.attention_chunk_size:
        chunk = options.attention_chunk_size
        seen &= (positions // chunk)[:, None] == (keys // chunk)[None, :]
    return seen


def attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """One request: the last rows of its keys are the queries' own.

    query [tokens, num_heads, size], key and value [seq_len, num_kv_heads, size]. Returns the output
    and the natural log of the softmax denominators [tokens, num_heads].
    """
    tokens, num_heads, _ = query.shape
    group = num_heads // key.shape[1]
    keys = np.arange(key.shape[0])
    positions = np.arange(tokens) + key.shape[0] - tokens
    seen = _visible(positions, keys, options)
    output = np.zeros((tokens, num_heads, value.shape[2]))
    lse = np.full((tokens, num_heads), -np.inf)
    for head in range(num_heads):
        logits = options.scale * (query[:, head] @ key[:, head // group].T)
        if options.logits_soft_cap:
            logits = options.logits_soft_cap * np.tanh(logits / options.logits_soft_cap)
        if options.alibi_slopes:
            logits += options.alibi_slopes[head] * (keys[None, :] - positions[:, None])
        logits = np.where(seen, logits, -np.inf)
        highest = np.maximum(logits.max(axis=1), options.sinks[head] if options.sinks else -np.inf)
        weights = np.exp(logits - highest[:, None])
        total = weights.sum(axis=1)
        if options.sinks:
            total += np.exp(options.sinks[head] - highest)
        output[:, head] = weights @ value[:, head // group] / total[:, None]
        lse[:, head] = highest + np.log(total)
    return output, lse
