"""Attention over latent rows (MLA, absorbed), as in flashinfer.mla."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import clattn
from clattn.arrays import numbers
from clattn.errors import InvalidArgument
from clattn.flashinfer.arguments import check_common, refuse, scale_of
from clattn.flashinfer.wrapper import SKIPS, check_most, check_rows
from clattn.foreign import (
    dtype_name,
    host_array,
    int32s,
    library,
    lists_of,
    only,
    starts,
    stored_bytes,
)


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Which queries and pages a step has: lists (csr), rows of a table (dense)."""

    qo_indptr: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None
    kv_len_arr: Any = None
    cum_seq_lens_q: Any = None
    block_tables: Any = None
    seq_lens: Any = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any
    ) -> "MLAPlanMetadata":
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Any, block_tables: Any, seq_lens: Any, max_q_len: int | None = None
    ) -> "MLAPlanMetadata":
        return cls(
            cum_seq_lens_q=cum_seq_lens_q,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_q_len=max_q_len,
        )

    def keywords(self, page_size: int) -> dict[str, Any]:
        """For clattn.paged_attention()."""
        lists = (self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len_arr)
        table = (self.cum_seq_lens_q, self.block_tables, self.seq_lens)
        by_list, by_table = (all(part is not None for part in form) for form in (lists, table))
        if by_list == by_table or any(part is not None for part in (table if by_list else lists)):
            raise InvalidArgument(
                "metadata: neither or both, legal: qo_indptr, kv_indptr, kv_indices and "
                "kv_len_arr, or cum_seq_lens_q, block_tables and seq_lens"
            )
        if by_table:
            query = starts(self.cum_seq_lens_q, "cum_seq_lens_q")
            lens = int32s(self.seq_lens, "seq_lens", len(query) - 1)
            check_most(self.max_q_len, np.diff(query), "max_q_len")
            table = numbers(self.block_tables, "int32", 2, "block_tables")
            page_starts, pages = lists_of(table, lens, page_size, "block_tables")
        else:
            refuse("lists say it", max_q_len=self.max_q_len)
            query = starts(self.qo_indptr, "qo_indptr")
            page_starts = starts(self.kv_indptr, "kv_indptr", len(query) - 1)
            pages = int32s(self.kv_indices, "kv_indices")[: page_starts[-1]]
            lens = int32s(self.kv_len_arr, "kv_len_arr", len(query) - 1)
            if len(pages) < page_starts[-1]:
                raise InvalidArgument(
                    f"kv_indices: {len(pages)} pages, legal: at least {page_starts[-1]}"
                )
        return {
            "query_start_loc": query,
            "seq_lens": lens,
            "block_table": pages,
            "page_start_loc": page_starts,
        }


class BatchMLAPagedAttentionWrapper:
    """Tokens of each request over the latent rows in its pages.

    float_workspace_buffer may be anything: CLAttn takes memory of its own. The keywords `device`
    and `queue` are those of clattn.attention().
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
        *,
        device: str = "",
        queue: Any = None,
    ) -> None:
        del float_workspace_buffer
        check_common(backend, "NONE")
        refuse(
            "steps are recorded by clattn.AttentionState, not by a wrapper",
            use_cuda_graph=use_cuda_graph, qo_indptr=qo_indptr, kv_indptr=kv_indptr,
            kv_indices=kv_indices, kv_len_arr=kv_len_arr,
        )  # fmt: skip
        self._where = {"device": device, "queue": queue}
        self._plan = None

    def plan(
        self,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Any = None,
        block_tables: Any = None,
        seq_lens: Any = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: Any = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Lists by `metadata` or one by one. lse_mode, query_layout and kv_cache_layout may be left
        out: run() sees what it gets; what is said here must be so there. enable_pdl is a hint for
        one vendor's devices."""
        del enable_pdl
        refuse("there is no profiler in kernels", use_profiler=use_profiler)
        refuse(SKIPS, skip_softmax=skip_softmax)
        only("output_scale", output_scale, "none", because="outputs have the type of queries")
        only("scale_mode", scale_mode, "default", because="the softmax scale takes factors, too")
        flat = MLAPlanMetadata(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens,
            max_q_len,
        )  # fmt: skip
        if metadata is not None and flat != MLAPlanMetadata():
            raise InvalidArgument("metadata: given beside lists, legal: one of them")
        needed = {
            "num_heads": num_heads, "head_dim_ckv": head_dim_ckv, "head_dim_kpe": head_dim_kpe,
            "page_size": page_size, "causal": causal, "sm_scale": sm_scale,
            "q_data_type": q_data_type, "kv_data_type": kv_data_type,
        }  # fmt: skip
        for name, value in needed.items():
            if value is None:
                raise InvalidArgument(f"{name}: None, legal: a value")
        dtype = dtype_name(q_data_type, "q_data_type")
        output = dtype if output_dtype is None else dtype_name(output_dtype, "output_dtype")
        only("output_dtype", output, dtype, because="outputs have the type of queries")
        self._plan = {
            **(metadata or flat).keywords(page_size),
            "causal": bool(causal),
            "num_heads": num_heads,
            "head_size": head_dim_ckv + head_dim_kpe,
            "rope_dim": head_dim_kpe,
            "use_mla": True,
            "scale": float(sm_scale),
            "dtype": dtype,
            "kv_cache_dtype": dtype_name(kv_data_type, "kv_data_type"),
        }
        self._page_size = page_size
        self._said = query_layout, kv_cache_layout, lse_mode, use_sinks

    def run(
        self,
        q_nope: Any = None,
        q_pe: Any = None,
        ckv_cache: Any = None,
        kpe_cache: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: Any = None,
        ckv_scale_arr: Any = None,
        kpe_scale: Any = None,
        sinks: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Any:
        """out [tokens, num_heads, head_dim_ckv], or with return_lse (out, lse [tokens, num_heads]).

        query and kv_cache: rows [..., head_dim_ckv + head_dim_kpe], or pairs of their two parts
        (q_nope and q_pe, ckv_cache and kpe_cache). Parts that are no neighbours in memory are
        copied next to each other: of the cache the pages in use. kv_cache may be a clattn.KVCache,
        with query and out in device memory.
        """
        refuse("there is no profiler in kernels", profiler_buffer=profiler_buffer)
        refuse("plan() was given that", kv_len=kv_len, page_table=page_table)
        refuse("outputs have the type of queries", o_scale=o_scale)
        refuse(SKIPS, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        refuse(
            "scales of latent caches are KVCache.set_scales()'s", ckv_scale_arr=ckv_scale_arr,
            bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale,
        )  # fmt: skip
        for name, value in {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale}.items():
            only(name, scale_of(value, name), 1.0, because="KVCache.set_scales() takes a scale")
        if self._plan is None:
            raise InvalidArgument("run(): no plan, legal after plan()")
        query = _either(query, (q_nope, q_pe), "query", "q_nope, q_pe")
        kv_cache = _either(kv_cache, (ckv_cache, kpe_cache), "kv_cache", "ckv_cache, kpe_cache")
        self._check_said(query, kv_cache, return_lse, return_lse_base_on_e, sinks)
        plan = dict(self._plan)
        if isinstance(query, tuple):
            query = side_by_side(query, ("q_nope", "q_pe"), 3)
        check_rows(query, plan["query_start_loc"])
        if not isinstance(kv_cache, clattn.KVCache):
            kv_cache, plan["block_table"] = self._rows(kv_cache, plan["block_table"])
        if sinks is not None:
            plan["sinks"] = np.asarray(sinks, np.float32).tolist()
        result = clattn.paged_attention(
            query, kv_cache, out=out, lse=lse, return_lse=return_lse,
            lse_base="e" if return_lse_base_on_e else "2", **plan, **self._where,
        )  # fmt: skip
        return result[0] if lse is not None and not return_lse else result

    def _check_said(
        self, query: Any, kv_cache: Any, return_lse: bool, base_e: bool, sinks: Any
    ) -> None:
        """What plan() said of run()."""
        query_layout, kv_cache_layout, lse_mode, use_sinks = self._said
        for name, said, given in (
            ("query_layout", query_layout, query),
            ("kv_cache_layout", kv_cache_layout, kv_cache),
        ):
            found = "split" if isinstance(given, tuple) else "packed"
            if said not in (None, found):
                raise InvalidArgument(f"{name}: {said!r} in plan(), legal here: {found!r}")
        if lse_mode not in ("none", "base2", "basee"):
            raise InvalidArgument(f"lse_mode: {lse_mode!r}, legal: 'none', 'base2' or 'basee'")
        if lse_mode != "none" and return_lse and (lse_mode == "basee") != base_e:
            raise InvalidArgument(f"return_lse_base_on_e: {base_e}, legal: as {lse_mode!r} says")
        if use_sinks != (sinks is not None):
            raise InvalidArgument(f"sinks: not as use_sinks={use_sinks}, legal: as plan() said")

    def _rows(self, given: Any, table: np.ndarray) -> tuple[tuple[Any, Any], np.ndarray]:
        """A cache [pages, page_size, 1, size] and the pages' numbers in it."""
        pages = table
        if isinstance(given, tuple):
            parts = tuple(map(stored_bytes, given))
            rows = neighbours(*parts)
            if rows is None:
                used, numbers_of = np.unique(table, return_inverse=True)
                used = used if len(used) else np.zeros(1, np.int32)
                wrong = used[(used < 0) | (used >= len(parts[0]))]
                if len(wrong):
                    legal = f"0 ... {len(parts[0]) - 1}"
                    raise InvalidArgument(f"kv_indices: {wrong[0]}, legal: {legal}")
                rows = side_by_side(
                    tuple(part[used] for part in parts), ("ckv_cache", "kpe_cache"), 3
                )
                pages = numbers_of.astype(np.int32).reshape(table.shape)
        else:
            rows = stored_bytes(host_array(given, "kv_cache", 3))
        if rows.shape[1] != self._page_size:
            raise InvalidArgument(
                f"kv_cache: pages of {rows.shape[1]} tokens, legal: {self._page_size}, as planned"
            )
        cache = rows[:, :, None]
        return (cache, cache), pages


def _either(packed: Any, pair: tuple[Any, Any], name: str, names: str) -> Any:
    if (packed is None) != any(part is not None for part in pair):
        raise InvalidArgument(f"{name}: neither or beside {names}, legal: one form")
    given = pair if packed is None else packed
    if isinstance(given, (tuple, list)):
        if len(given) != 2 or any(part is None for part in given):
            raise InvalidArgument(f"{names}: one of two, legal: both")
        return tuple(given)
    return given


def neighbours(first: Any, second: Any) -> Any:
    """Two parts of the same rows as those rows, if they lie so in memory; else None."""
    module = library(first)
    if module is not library(second) or first.dtype != second.dtype:
        return None
    width = first.shape[-1] + second.shape[-1]
    if module is np:
        begin, at = (array.__array_interface__["data"][0] for array in (first, second))
        strides = [array.strides for array in (first, second)]
    else:
        begin, at = first.data_ptr(), second.data_ptr()
        strides = [array.stride() for array in (first, second)]
    size = first.itemsize
    if strides[0] != strides[1] or at != begin + first.shape[-1] * size:
        return None
    if first.shape[:-1] != second.shape[:-1]:
        return None
    if module is np:
        return np.lib.stride_tricks.as_strided(first, (*first.shape[:-1], width), strides[0])
    return first.as_strided((*first.shape[:-1], width), strides[0])


def side_by_side(parts: tuple[Any, Any], names: tuple[str, str], dims: int) -> Any:
    """Rows of both parts, copied unless they are neighbours."""
    for part, name in zip(parts, names, strict=True):
        host_array(part, name, dims)
    if parts[0].shape[:-1] != parts[1].shape[:-1] or parts[0].dtype != parts[1].dtype:
        raise InvalidArgument(
            f"{names[1]}: {parts[1].dtype} {list(parts[1].shape)}, legal: of {names[0]}'s type and "
            f"rows, {parts[0].dtype} {list(parts[0].shape[:-1])}"
        )
    rows = neighbours(*parts)
    return library(parts[0]).concatenate(parts, -1) if rows is None else rows
