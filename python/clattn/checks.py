"""Compares a device with double precision: clattn.check(), and the cases that the tests run too."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clattn import _clattn, reference

#: Requests as (query tokens, tokens in the cache with them).
DECODE = [(1, 1), (1, 40), (1, 333)]
PREFILL = [(5, 5), (70, 70)]
CHUNKED = [(16, 48), (3, 130)]
MIXED = [(1, 77), (19, 19), (1, 5), (8, 160)]


@dataclass
class Case:
    """One kind of work: a batch, and what the layer does to its logits and its cache."""

    name: str
    requests: list[tuple[int, int]]
    options: dict[str, Any] = field(default_factory=dict)
    layout: str | None = None


_SLOPES = [2.0**-h for h in range(1, 9)]
CASES = [
    Case("decode", DECODE),
    Case("prefill", PREFILL),
    Case("chunked prefill", CHUNKED),
    Case("mixed", MIXED),
    Case("f16", MIXED, {"dtype": "f16"}),
    Case("bf16", MIXED, {"dtype": "bf16"}),
    Case("sliding window", MIXED, {"sliding_window": 24}),
    Case("chunked-local", MIXED, {"attention_chunk_size": 32}),
    Case("soft cap", MIXED, {"logits_soft_cap": 1.5}),
    Case("sinks", MIXED, {"sinks": [0.5 * h - 2 for h in range(8)]}),
    Case("ALiBi", MIXED, {"alibi_slopes": _SLOPES}),
    Case("fp8 e4m3", MIXED, {"kv_cache_dtype": "fp8_e4m3"}),
    Case("fp8 e5m2", MIXED, {"kv_cache_dtype": "fp8_e5m2"}),
    Case("int8", MIXED, {"kv_cache_dtype": "int8"}),
    Case("NHD", MIXED, layout="NHD"),
    Case("HND", MIXED, layout="HND"),
    Case("everything", MIXED, {
        "dtype": "f16", "sliding_window": 50, "logits_soft_cap": 2.0, "alibi_slopes": _SLOPES,
        "sinks": [0.25] * 8, "kv_cache_dtype": "fp8_e4m3",
    }),
]  # fmt: skip


@dataclass
class Result:
    """What a case gave: the largest errors of the output and of the LSE, and what is allowed."""

    name: str
    error: float
    lse_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed and self.lse_error <= self.allowed

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"{self.name:16} {verdict}  error {self.error:.1e}, allowed {self.allowed:.1e}"


class Batch:
    """Requests in pages that lie in any order, with table entries behind a list's end unusable."""

    def __init__(self, requests: list[tuple[int, int]], block_size: int, random) -> None:
        self.requests = requests
        self.pages = [-(-length // block_size) for _, length in requests]
        self.num_blocks = sum(self.pages) + 3
        order = random.permutation(self.num_blocks).astype(np.int32)
        self.block_table = np.full((len(requests), max(self.pages)), 2**31 - 1, np.int32)
        for row, (count, end) in enumerate(zip(self.pages, np.cumsum(self.pages), strict=True)):
            self.block_table[row, :count] = order[end - count : end]
        self.query_start_loc = np.cumsum([0] + [tokens for tokens, _ in requests], dtype=np.int32)
        self.seq_lens = np.array([length for _, length in requests], np.int32)
        self.block_size = block_size

    def slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        pages = self.block_table[row, positions // self.block_size].astype(np.int64)
        return pages * self.block_size + positions % self.block_size

    def metadata(self) -> _clattn.CommonAttentionMetadata:
        return _clattn.CommonAttentionMetadata(
            self.query_start_loc, self.seq_lens, self.block_table
        )


def stored_pages(queue: _clattn.Queue, cache: _clattn.KVCache) -> tuple[np.ndarray, np.ndarray]:
    """What a cache's elements stand for, before scales: K, V [blocks, tokens, heads, size]."""
    raw = np.empty(cache.buffer.size_bytes, np.uint8)
    queue.read(cache.buffer, raw)
    elements = raw.view(reference.STORAGE[cache.dtype])
    shape = (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size)

    def view(offset: int, token_stride: int, dim_stride: int) -> np.ndarray:
        strides = (cache.block_stride, token_stride, cache.head_stride, dim_stride)
        strides = [stride * elements.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(elements[offset:], shape, strides)

    key_token_stride = 1 if cache.keys_by_dim else cache.token_stride
    key = view(cache.k_offset, key_token_stride, cache.key_dim_stride)
    value = view(cache.v_offset, cache.token_stride, 1)
    return reference.decode(key, cache.dtype), reference.decode(value, cache.dtype)


class Layer:
    """A layer of 8 heads over 2 KV heads with everything that a step needs."""

    def __init__(self, context: _clattn.Context, queue: _clattn.Queue, case: Case) -> None:
        options = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "f32"}
        self.config = _clattn.AttentionConfig(**(options | case.options))
        self.context, self.queue, self.case = context, queue, case
        self.random = np.random.default_rng(7)
        self.batch = Batch(case.requests, self.config.block_size, self.random)
        self.backend = _clattn.get_attn_backend(self.config, context)
        self.impl = self.backend.make_impl(context, self.config)
        self.builder = self.backend.make_builder(context, self.config)
        self.cache = _clattn.make_kv_cache(
            context, queue, self.backend, self.config, self.batch.num_blocks, case.layout
        )
        self.scales = np.ones(2, np.float32)
        if self.cache.dtype in ("fp8_e4m3", "fp8_e5m2", "int8"):
            self.scales = np.array([0.03, 0.02], np.float32)
            self.cache.set_scales(context, self.scales)
        if self.cache.dtype != "int8":  # the bits of a NaN in every other type
            queue.write(self.cache.buffer, np.full(self.cache.buffer.size_bytes, 0xFF, np.uint8))

    def rows(self, tokens: int, heads: int, spread: float) -> np.ndarray:
        values = spread * self.random.standard_normal((tokens, heads, self.config.head_size))
        return reference.encode(values, self.config.dtype)

    def step(self) -> tuple[list, np.ndarray, np.ndarray]:
        """Fills the cache, attends; gives each request's slots and queries, output and LSE."""
        metadata = self.builder.build(self.queue, self.batch.metadata())
        tokens = int(self.batch.query_start_loc[-1])
        query = self.rows(tokens, self.config.num_heads, 1.5)
        key = self.rows(tokens, self.config.num_kv_heads, 1.0)
        value = self.rows(tokens, self.config.num_kv_heads, 1.0)
        requests = []
        for row, (count, length) in enumerate(self.batch.requests):
            slots = self.batch.slots(row, np.arange(length))
            history = length - count
            if history:
                earlier = [self.rows(history, self.config.num_kv_heads, 1.0) for _ in range(2)]
                _clattn.reshape_and_cache_flash(
                    self.context, self.queue, *earlier, self.cache, slots[:history],
                    self.config.dtype,
                )  # fmt: skip
            start = self.batch.query_start_loc[row]
            requests.append((slots, query[start : start + count]))
        self.impl.write_kv_cache(self.queue, key, value, self.cache, metadata)
        output = np.zeros_like(query)
        lse = np.zeros((tokens, self.config.num_heads), np.float32)
        self.impl.forward(self.queue, query, output, self.cache, metadata, lse=lse)
        return requests, output, lse

    def allowed(self) -> float:
        """Twice the rounding of outputs of up to 4 and of weights, and a floor for sums in f32."""
        weights = any(kernel.rounds_weights for kernel in self.impl.kernels())
        return 2 * (1 + weights) * 4 * reference.ROUNDOFF[self.config.dtype] + 2e-5


def run(context: _clattn.Context, queue: _clattn.Queue, case: Case) -> Result:
    """Runs a case and compares it with attention over what its cache holds."""
    layer = Layer(context, queue, case)
    requests, output, lse = layer.step()
    pages = stored_pages(queue, layer.cache)
    key, value = (
        scale * page.reshape(-1, *page.shape[2:])
        for page, scale in zip(pages, layer.scales.astype(np.float64), strict=True)
    )
    config = layer.config
    options = reference.Options(
        scale=config.scale or config.head_size**-0.5,
        logits_soft_cap=config.logits_soft_cap,
        sliding_window=config.sliding_window,
        attention_chunk_size=config.attention_chunk_size,
        alibi_slopes=config.alibi_slopes,
        sinks=config.sinks,
    )
    error = lse_error = 0.0
    for (slots, query), start in zip(requests, layer.batch.query_start_loc, strict=False):
        want, want_lse = reference.attention(
            reference.decode(query, config.dtype), key[slots], value[slots], options
        )
        rows = slice(start, start + len(query))
        got = reference.decode(output[rows], config.dtype)
        error = float(np.maximum(error, np.abs(got - want).max()))
        lse_error = float(np.maximum(lse_error, np.abs(lse[rows] - want_lse).max()))
    return Result(case.name, error, lse_error, layer.allowed())


def check(
    device: str = "",
    cases: Iterable[Case] = CASES,
    progress: Callable[[int, int], object] | None = None,
) -> list[Result]:
    """Whether a device computes what it should: one result per case, whether it passed or not.

    progress(done, total) is called before the first case and after each.
    """
    context = _clattn.Context(device)
    queue = context.create_queue()
    cases = list(cases)
    results: list[Result] = []
    for case in cases:
        if progress is not None:
            progress(len(results), len(cases))
        results.append(run(context, queue, case))
    if progress is not None:
        progress(len(cases), len(cases))
    return results
