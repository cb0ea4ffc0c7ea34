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
    said: list[reference.Request] = field(default_factory=list)  #: of each request, or none


_SAID = [
    reference.Request(reference.CAUSAL, [(60, 80)], 30),
    reference.Request(reference.CAUSAL, [(0, 5), (5, 17)]),
    reference.Request(reference.BOTH_WAYS, [], 2),
    reference.Request(reference.CANVAS, [(150, 158)], 4),
]
TREES = [(7, 40), (3, 90), (1, 20)]
_SLOPES = [2.0**-h for h in range(1, 9)]
CASES = [
    Case("decode", DECODE),
    Case("prefill", PREFILL),
    Case("chunked prefill", CHUNKED),
    Case("mixed", MIXED),
    Case("f16", MIXED, {"dtype": "f16"}),
    Case("bf16", MIXED, {"dtype": "bf16"}),
    Case("sliding window", MIXED, {"sliding_window": 24}),
    Case("window of its left side", MIXED, {"window_left": 40}),
    Case("chunked-local", MIXED, {"attention_chunk_size": 32}),
    Case("chunks with lookback", MIXED, {"attention_chunk_size": 16, "chunk_lookback": 2}),
    Case("soft cap", MIXED, {"logits_soft_cap": 1.5}),
    Case("sinks", MIXED, {"sinks": [0.5 * h - 2 for h in range(8)]}),
    Case("ALiBi", MIXED, {"alibi_slopes": _SLOPES}),
    Case("images", MIXED, {"use_spans": True, "sliding_window": 24},
         said=[reference.Request(spans=request.spans) for request in _SAID]),
    Case("directions", MIXED, {"use_directions": True, "use_first_keys": True, "use_spans": True,
                               "window_left": 20, "span_rule": "clip_left"}, said=_SAID),
    Case("kept keys", MIXED, {"use_keep_keys": True, "sliding_window": 24},
         said=[reference.Request(keep_keys=min(4 * at, keys))
               for at, (_, keys) in enumerate(MIXED)]),
    Case("trees", TREES, {"use_trees": True, "sliding_window": 24, "alibi_slopes": _SLOPES}, said=[
        reference.Request(parents=[-1, 0, 0, 1, 1, 3, -1]),
        reference.Request(parents=[-1, 0, 0, 2, 2]),
        reference.Request(),
    ]),
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


def lists_of(said: list[reference.Request]) -> dict[str, list]:
    """What is said of a batch's requests, as arguments of CommonAttentionMetadata."""
    lists: dict[str, list] = {}
    if any(request.direction is not None for request in said):
        lists["direction"] = [request.direction for request in said]
    if any(request.spans for request in said):
        lists["spans"] = [span for request in said for span in request.spans]
        ends = np.cumsum([len(request.spans) for request in said])
        lists["span_start_loc"] = [0, *ends.tolist()]
    if any(request.first_key for request in said):
        lists["first_keys"] = [request.first_key for request in said]
    if any(request.keep_keys for request in said):
        lists["keep_keys"] = [request.keep_keys for request in said]
    if any(request.parents for request in said):
        lists["tree_parents"] = [node for request in said for node in request.parents]
        ends = np.cumsum([len(request.parents) for request in said])
        lists["tree_start_loc"] = [0, *ends.tolist()]
    return lists


class Batch:
    """Requests in pages that lie in any order, with table entries behind a list's end unusable."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        block_size: int,
        random,
        said: list[reference.Request] | None = None,
    ) -> None:
        self.requests, self.said = requests, said or []
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
            self.query_start_loc, self.seq_lens, self.block_table, **lists_of(self.said)
        )


def pages_of(elements: np.ndarray, cache: _clattn.KVCache) -> tuple[np.ndarray, np.ndarray]:
    """K and V [blocks, tokens, heads, size] as views of the elements of a cache's buffer."""
    shape = (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size)
    strides = (cache.block_stride, cache.token_stride, cache.head_stride, 1)
    strides = [stride * elements.itemsize for stride in strides]
    key, value = (
        np.lib.stride_tricks.as_strided(elements[offset:], shape, strides)
        for offset in (cache.k_offset, cache.v_offset)
    )
    return key, value


def stored_pages(queue: _clattn.Queue, cache: _clattn.KVCache) -> tuple[np.ndarray, np.ndarray]:
    """What a cache's elements stand for, before scales: K, V [blocks, tokens, heads, size]."""
    raw = np.empty(cache.buffer.size_bytes, np.uint8)
    queue.read(cache.buffer, raw)
    key, value = pages_of(raw.view(reference.STORAGE[cache.dtype]), cache)
    return reference.decode(key, cache.dtype), reference.decode(value, cache.dtype)


class Layer:
    """A layer of 8 heads over 2 KV heads with everything that a step needs."""

    def __init__(self, context: _clattn.Context, queue: _clattn.Queue, case: Case) -> None:
        options = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "f32"}
        self.config = _clattn.AttentionConfig(**(options | case.options))
        self.context, self.queue, self.case = context, queue, case
        self.random = np.random.default_rng(7)
        self.batch = Batch(case.requests, self.config.block_size, self.random, case.said)
        self.backend = _clattn.get_attn_backend(self.config, context)
        self.impl = self.backend.make_impl(context, self.config)
        self.builder = self.backend.make_builder(context, self.config)
        self.cache = _clattn.make_kv_cache(
            context, queue, self.backend, self.config, self.batch.num_blocks, case.layout
        )
        self.scales = np.ones(2, np.float32)
        if self.cache.format in ("fp8_e4m3", "fp8_e5m2", "int8"):
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
        weights = any(kernel.rounds_probabilities for kernel in self.impl.kernels())
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
        chunk_lookback=config.chunk_lookback,
        window_left=config.window_left,
        window_right=config.window_right,
        span_rule=config.span_rule,
        alibi_slopes=config.alibi_slopes,
        sinks=config.sinks,
    )
    error = lse_error = 0.0
    said = case.said or [reference.Request()] * len(requests)
    starts = layer.batch.query_start_loc[:-1]
    for (slots, query), start, request in zip(requests, starts, said, strict=True):
        want, want_lse = reference.attention(
            reference.decode(query, config.dtype), key[slots], value[slots], options, request
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
