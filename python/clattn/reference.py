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
    chunk_lookback: int = 0
    window_left: int = -1
    window_right: int = -1
    span_rule: str = "whole"
    alibi_slopes: list[float] = field(default_factory=list)
    sinks: list[float] = field(default_factory=list)


#: Values of a request's direction.
BOTH_WAYS, CAUSAL, CANVAS = range(3)


@dataclass
class Request:
    """What a batch says of one request beyond lengths; CommonAttentionMetadata's names."""

    direction: int | None = None  #: None = as Options.causal says
    spans: list[tuple[int, int]] = field(default_factory=list)  #: first position, one past the last
    first_key: int = 0
    keep_keys: int = 0
    parents: list[int] = field(default_factory=list)  #: of the newest tokens, drafts in a tree


def _places(keys: int, parents: list[int]) -> np.ndarray:
    """[keys]: the position of each stored key on the path to it, if the newest are a tree."""
    places = np.arange(keys)
    before = keys - len(parents)
    for node, parent in enumerate(parents):
        places[before + node] = before if parent < 0 else places[before + parent] + 1
    return places


def _visible_in_tree(
    tokens: int, keys: int, options: Options, request: Request
) -> np.ndarray:
    """[tokens, keys]: each draft sees what the last token of the sequence to it would see."""
    before = keys - len(request.parents)
    alone = Request(first_key=request.first_key, keep_keys=request.keep_keys)
    seen = np.zeros((tokens, keys), bool)
    for row in range(tokens):
        path, node = [], len(request.parents) - tokens + row
        while node >= 0:
            path.insert(0, before + node)
            node = request.parents[node]
        stored = np.array([*range(before), *path])
        places = np.arange(len(stored))
        seen[row, stored[_visible(places[-1:], places, options, alone)[0]]] = True
    return seen


def _visible(
    positions: np.ndarray, keys: np.ndarray, options: Options, request: Request
) -> np.ndarray:
    """[tokens, keys]: which keys the tokens at the positions attend to."""
    if request.parents:
        return _visible_in_tree(len(positions), len(keys), options, request)
    direction = request.direction
    if direction is None:
        direction = CAUSAL if options.causal else BOTH_WAYS
    row, key = positions[:, None], keys[None, :]
    left, right = options.window_left, options.window_right
    if options.sliding_window:
        left = right = options.sliding_window - 1
    # A canvas has one window to the left for all its tokens, and none to the right.
    origin = positions[0] if direction == CANVAS and len(positions) else row
    in_left = (origin - key <= left) | (left < 0)
    in_right = (key - row <= right) | (right < 0) | (direction == CANVAS)
    in_chunk = ahead_in_chunk = np.ones((len(positions), len(keys)), bool)
    if options.attention_chunk_size:
        back = row // options.attention_chunk_size - key // options.attention_chunk_size
        in_chunk, ahead_in_chunk = back <= options.chunk_lookback, back >= 0
    in_span = np.zeros(in_chunk.shape, bool)
    for first, end in request.spans:
        in_span |= (first <= row) & (row < end) & (first <= key) & (key < end)
    ahead = in_right
    if direction == CAUSAL:
        ahead = key <= row
        if options.span_rule == "clip_left":
            ahead = ahead | in_span
        elif options.span_rule == "clip_both":
            ahead = ahead | (in_span & in_right)
    seen = ((in_left & in_chunk) | (key < request.keep_keys)) & ahead & ahead_in_chunk
    if options.span_rule == "whole":
        seen = seen | in_span
    return seen & (key >= request.first_key)


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    options: Options,
    request: Request | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One request: the last rows of its keys are the queries' own.

    query [tokens, num_heads, size], key and value [seq_len, num_kv_heads, size]. Returns the output
    and the natural log of the softmax denominators [tokens, num_heads]; a row that sees no key has
    output 0, and as its log that of its sink or -inf.
    """
    tokens, num_heads, _ = query.shape
    group = num_heads // key.shape[1]
    keys = np.arange(key.shape[0])
    positions = np.arange(tokens) + key.shape[0] - tokens
    request = request or Request()
    seen = _visible(positions, keys, options, request)
    places = _places(len(keys), request.parents)
    output = np.zeros((tokens, num_heads, value.shape[2]))
    lse = np.full((tokens, num_heads), -np.inf)
    for head in range(num_heads):
        logits = options.scale * (query[:, head] @ key[:, head // group].T)
        if options.logits_soft_cap:
            logits = options.logits_soft_cap * np.tanh(logits / options.logits_soft_cap)
        if options.alibi_slopes:
            own = places[positions] if request.parents else positions
            ahead = places[None, :] - own[:, None]
            logits += options.alibi_slopes[head] * ahead
        logits = np.where(seen, logits, -np.inf)
        sink = options.sinks[head] if options.sinks else -np.inf
        rows = seen.any(axis=1)
        lse[:, head] = sink  # what a row without keys has
        highest = np.maximum(logits[rows].max(axis=1, initial=-np.inf), sink)
        weights = np.exp(logits[rows] - highest[:, None])
        total = weights.sum(axis=1) + np.exp(sink - highest)
        output[rows, head] = weights @ value[:, head // group] / total[:, None]
        lse[rows, head] = highest + np.log(total)
    return output, lse
