"""What FlashInfer's wrappers have in common."""

from typing import Any

import numpy as np

import clattn
from clattn.errors import InvalidArgument, Unsupported
from clattn.flashinfer.arguments import (
    check_common,
    check_layout,
    keys_and_values,
    page_lens,
    refuse,
    scale_of,
)
from clattn.foreign import in_one_allocation, int32s, paged_lists, starts, stored_bytes

SPLITS = "CLAttn chooses how keys are split"
HEAD_SCALES = "caches with a scale for each token and head are not supported here"
ITEMS = "scoring of several items at once is not supported; a mask can say it"
SKIPS = "every key that a token sees counts"
JIT = "kernels of the caller's own are not compiled in; clattn.register_backend() takes a backend"
LSE = {"lse_base": {"log2": "2", "ln": "e"}, "lse_layout": {"NH": "tokens", "HN": "heads"}}


def lse_words(lse_base: str, lse_layout: str) -> dict[str, str]:
    """Keywords of clattn.attention() for FlashInfer's."""
    words = {}
    for name, value in {"lse_base": lse_base, "lse_layout": lse_layout}.items():
        if value not in LSE[name]:
            legal = " or ".join(map(repr, LSE[name]))
            raise InvalidArgument(f"{name}: {value!r}, legal: {legal}")
        words[name] = LSE[name][value]
    return words


def scaled(result: Any, v_scale: Any) -> Any:
    """The result with its output times a factor, in place."""
    factor = scale_of(v_scale, "v_scale")
    if factor == 1.0:
        return result
    out = result[0] if isinstance(result, tuple) else result
    if not hasattr(out, "dtype") or "float" not in str(out.dtype):
        raise Unsupported(
            f"v_scale: {factor}, legal where the output is an array of floats: any, else 1; "
            "KVCache.set_scales() gives a cache its factors"
        )
    out *= factor
    return result


class Wrapper:
    """Where a wrapper runs, and what it was planned for.

    float_workspace_buffer may be anything, None too: CLAttn takes memory of its own. The keywords
    `device` and `queue` are those of clattn.attention().
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        graph_buffers: dict[str, Any],
        device: str = "",
        queue: Any = None,
    ) -> None:
        del float_workspace_buffer
        check_layout(kv_layout)
        check_common(backend, "NONE")
        graphs = "steps are recorded by clattn.AttentionState, not by a wrapper"
        refuse(graphs, use_cuda_graph=use_cuda_graph, **graph_buffers)
        refuse(JIT, jit_args=jit_args, jit_kwargs=jit_kwargs)
        self._kv_layout = kv_layout
        self._where = {"device": device, "queue": queue}
        self._layer = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Does nothing: CLAttn takes memory of its own."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **{**kwargs, "return_lse": True})

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **{**kwargs, "return_lse": True})

    def _planned(self, **changes: Any) -> Any:
        if self._layer is None:
            raise InvalidArgument("run(): no plan, legal after plan()")
        return self._layer.changed(**changes) if changes else self._layer


class PagedWrapper(Wrapper):
    """A wrapper over pages; plan() sets the lists."""

    _query_starts: np.ndarray
    _key_lens: np.ndarray
    _page_size: int
    _rows_by = "qo_indptr"  #: the argument of plan() that says how many rows q has
    _lists: dict[str, np.ndarray]

    def _take_pages(
        self,
        qo_indptr: Any,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        page_size: int,
        seq_lens: Any,
    ) -> None:
        """qo_indptr: tokens, or a number of them that each request has."""
        page_starts = starts(indptr, "paged_kv_indptr")
        requests = len(page_starts) - 1
        if isinstance(qo_indptr, int):
            self._query_starts = np.arange(requests + 1, dtype=np.int32) * np.int32(qo_indptr)
        else:
            self._query_starts = starts(qo_indptr, "qo_indptr", requests)
        pages = int32s(indices, "paged_kv_indices")[: page_starts[-1]]
        if len(pages) < page_starts[-1]:
            raise InvalidArgument(
                f"paged_kv_indices: {len(pages)} pages, legal: at least {page_starts[-1]}"
            )
        self._page_size = page_size
        self._key_lens = page_lens(page_starts, last_page_len, page_size)
        check_lens(seq_lens, self._key_lens, "seq_lens")
        self._lists = paged_lists(
            self._query_starts, page_starts, pages, self._key_lens, page_size
        )

    def _cache(self, cache: Any) -> tuple[Any, np.ndarray]:
        """What paged_attention() reads, and the pages' numbers in it."""
        pages = self._lists["block_table"]
        if isinstance(cache, clattn.KVCache):
            block_size = cache.block_size
            found = cache, pages
        else:
            keys, values = map(stored_bytes, keys_and_values(cache, self._kv_layout))
            block_size = keys.shape[1]
            found = in_one_allocation(keys, values, pages)
        if block_size != self._page_size:
            raise InvalidArgument(
                f"paged_kv_cache: pages of {block_size} tokens, legal: {self._page_size}, as "
                "planned"
            )
        return found

    def _run(
        self,
        q: Any,
        paged_kv_cache: Any,
        layer: Any,
        *,
        q_scale: Any = None,
        k_scale: Any,
        v_scale: Any,
        out: Any = None,
        lse: Any = None,
        return_lse: bool,
        sinks: Any = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> Any:
        check_rows(q, self._query_starts, self._rows_by)
        cache, pages = self._cache(paged_kv_cache)
        factor = scale_of(q_scale, "q_scale") * scale_of(k_scale, "k_scale")
        keywords = layer.keywords(return_lse, factor)
        if sinks is not None:
            keywords["sinks"] = np.asarray(sinks, np.float32).tolist()
        result = clattn.paged_attention(
            q,
            cache,
            out=out,
            lse=lse,
            **{**self._lists, "block_table": pages},
            **lse_words(lse_base, lse_layout),
            **keywords,
            **self._where,
        )
        return scaled(result if return_lse or lse is None else result[0], v_scale)


def check_rows(q: Any, query_starts: np.ndarray, said_by: str = "qo_indptr") -> None:
    """Arrays have as many rows as were planned; device memory does not say how many it has."""
    if hasattr(q, "shape") and q.shape[0] != query_starts[-1]:
        raise InvalidArgument(f"q: {q.shape[0]} rows, legal: {query_starts[-1]}, as {said_by} says")


def check_lens(given: Any, lens: np.ndarray, name: str) -> None:
    """Lengths that a caller says a second time."""
    if given is not None and (int32s(given, name, len(lens)) != lens).any():
        raise InvalidArgument(f"{name}: not the lengths of the other lists, legal: {lens.tolist()}")


def check_most(given: int | None, lens: np.ndarray, name: str) -> None:
    """A bound of lengths that the lists say."""
    if given is not None and given < lens.max(initial=0):
        raise InvalidArgument(f"{name}: {given}, legal: at least {lens.max()}, as in the lists")
