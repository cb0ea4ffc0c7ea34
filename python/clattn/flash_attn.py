"""flash-attn's functions over CLAttn: attention on any OpenCL device.

    from clattn.flash_attn import flash_attn_func

Signatures and semantics are those of flash-attn 2.8, forward alone, over arrays of NumPy or PyTorch
on the host. The keywords `device` and `queue` are clattn.attention()'s. LSEs are natural logs. Two
differences: a row without keys has the LSE -inf, not +inf, and with alibi_slopes LSEs have the
biases of flash-attn's documentation, -slope * |distance|, not those of its causal kernels. What
cannot be computed is refused by an error that names the argument.
"""

from typing import Any

import numpy as np

import clattn
from clattn.arrays import numbers
from clattn.errors import InvalidArgument, Unsupported
from clattn.foreign import (
    host_array,
    in_one_allocation,
    int32s,
    lists_of,
    only,
    paged_lists,
    starts,
    store,
)
from clattn.functions import open_device

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _options(
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    dropout_p: float = 0.0,
) -> dict[str, Any]:
    """Keywords of clattn.attention()."""
    only("dropout_p", dropout_p, 0.0, because="there is no dropout")
    left, right = window_size
    options: dict[str, Any] = {"causal": bool(causal)}
    if softmax_scale is not None:
        options["scale"] = float(softmax_scale)
    if softcap > 0.0:
        options["logits_soft_cap"] = float(softcap)
    if left >= 0:
        options["window_left"] = left
    if right >= 0 and not causal:  # causal is a right side of 0
        options["window_right"] = right
    if alibi_slopes is not None:
        if np.ndim(alibi_slopes) != 1:
            raise Unsupported(
                f"alibi_slopes: {np.ndim(alibi_slopes)} dimensions, legal: 1, [heads], for all "
                "sequences"
            )
        if not causal and right != 0:
            raise Unsupported(
                "alibi_slopes: given with keys after a query, legal: with causal=True, or "
                "window_size[1] = 0: biases by absolute distance are not supported"
            )
        options["alibi_slopes"] = numbers(alibi_slopes, "float32", 1, "alibi_slopes").tolist()
    return options


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    device: str = "",
    queue: Any = None,
) -> Any:
    """q [batch, seqlen_q, nheads, headdim], k and v [batch, seqlen_k, nheads_k, headdim].

    causal: the last query has the position of the last key. window_size: keys to the left and to
    the right that a query sees, -1 = all. Returns out, or with return_attn_probs (out, lse [batch,
    nheads, seqlen_q], None): there are no probabilities without dropout. deterministic is about the
    backward pass, which there is not.
    """
    del deterministic
    for name, array in {"q": q, "k": k, "v": v}.items():
        host_array(array, name, 4)
    result = clattn.attention(
        q, k, v, return_lse=return_attn_probs, lse_layout="heads", device=device, queue=queue,
        **_options(causal, softmax_scale, window_size, softcap, alibi_slopes, dropout_p),
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    device: str = "",
    queue: Any = None,
) -> Any:
    """The same for sequences of unequal lengths, one after another: q [total_q, nheads, headdim], k
    and v [total_k, nheads_k, headdim].

    Sequence s has the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1. max_seqlen_q and
    max_seqlen_k may be anything from the longest sequence on. With block_table [sequences, columns]
    k and v are pages [num_blocks, page_block_size, nheads_k, headdim]. LSEs are [nheads, total_q].
    """
    del deterministic
    host_array(q, "q", 3)
    query_starts = starts(cu_seqlens_q, "cu_seqlens_q")
    key_starts = starts(cu_seqlens_k, "cu_seqlens_k", len(query_starts) - 1)
    for name, most, begins in (
        ("max_seqlen_q", max_seqlen_q, query_starts),
        ("max_seqlen_k", max_seqlen_k, key_starts),
    ):
        longest = np.diff(begins).max(initial=0)
        if most < longest:
            raise InvalidArgument(f"{name}: {most}, legal: at least {longest}")
    given = {
        "return_lse": return_attn_probs, "lse_layout": "heads", "device": device, "queue": queue,
        **_options(causal, softmax_scale, window_size, softcap, alibi_slopes, dropout_p),
    }  # fmt: skip
    if block_table is None:
        host_array(k, "k", 3), host_array(v, "v", 3)
        result = clattn.attention(
            q, k, v, query_start_loc=query_starts, key_start_loc=key_starts, **given
        )
    else:
        host_array(k, "k", 4), host_array(v, "v", 4)
        lists = lists_of(
            numbers(block_table, "int32", 2, "block_table"), np.diff(key_starts), k.shape[1],
            "block_table",
        )  # fmt: skip
        result = _attend(q, k, v, query_starts, lists, np.diff(key_starts), **given)
    return (*result, None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    device: str = "",
    queue: Any = None,
) -> Any:
    """q [batch, seqlen, nheads, headdim] over a cache: rows [batch_cache, seqlen_cache, nheads_k,
    headdim], of which cache_batch_idx names that of each sequence, or with block_table [batch,
    columns] pages [num_blocks, page_block_size, nheads_k, headdim] of any size.

    k and v [batch, seqlen_new, nheads_k, headdim] are stored behind cache_seqlens (a number, or
    [batch]) first. cache_leftpad [batch]: the first key of each sequence. Returns out, or with
    return_softmax_lse (out, lse [batch, nheads, seqlen]).
    """
    for name, value in {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}.items():
        only(name, value, None, because="rotate queries and keys before the call")
    only("rotary_interleaved", rotary_interleaved, True, because="nothing is rotated")
    only("num_splits", num_splits, 0, because="CLAttn chooses how keys are split")
    for name, array in {"q": q, "k_cache": k_cache, "v_cache": v_cache}.items():
        host_array(array, name, 4)
    batch = q.shape[0]
    table = _table(batch, k_cache, cache_batch_idx, block_table)
    most = table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        if k is not None:
            raise InvalidArgument("cache_seqlens: None, legal with k: where the new keys go")
        cache_seqlens = most
    if isinstance(cache_seqlens, int):
        cache_seqlens = np.full(batch, cache_seqlens, np.int32)
    lens = int32s(cache_seqlens, "cache_seqlens", batch)
    new = 0 if k is None else host_array(k, "k", 4).shape[1]
    wrong = (lens < 0) | (lens + new > most)
    if wrong.any():
        raise InvalidArgument(f"cache_seqlens: {lens[wrong][0]}, legal: 0 ... {most - new}")
    if (k is None) != (v is None):
        raise InvalidArgument("k, v: one of two, legal: both or none")
    if k is not None:
        _store(open_device(device, queue), {"k": (k, k_cache), "v": (v, v_cache)}, table, lens)
        lens = lens + np.int32(new)
    padding = None if cache_leftpad is None else int32s(cache_leftpad, "cache_leftpad", batch)
    return _attend(
        q, k_cache, v_cache, np.arange(batch + 1) * q.shape[1],
        lists_of(table, lens, k_cache.shape[1], "block_table"), lens, padding,
        return_lse=return_softmax_lse, lse_layout="heads", device=device, queue=queue,
        **_options(causal, softmax_scale, window_size, softcap, alibi_slopes),
    )  # fmt: skip


def _table(batch: int, cache: Any, cache_batch_idx: Any, block_table: Any) -> np.ndarray:
    """Rows of page ids, one a sequence; a cache of rows has pages of a whole row each."""
    if block_table is not None:
        only("cache_batch_idx", cache_batch_idx, None, because="block_table has the pages")
        table = numbers(block_table, "int32", 2, "block_table")
    elif cache_batch_idx is not None:
        table = int32s(cache_batch_idx, "cache_batch_idx", batch)[:, None]
        wrong = (table < 0) | (table >= len(cache))
        if wrong.any():
            legal = f"0 ... {len(cache) - 1}"
            raise InvalidArgument(f"cache_batch_idx: {table[wrong][0]}, legal: {legal}")
    else:
        table = np.arange(batch, dtype=np.int32)[:, None]
        if len(cache) < batch:
            raise InvalidArgument(f"k_cache: {len(cache)} rows, legal: at least {batch}, as q")
    return table


def _attend(
    q: Any,
    keys: Any,
    values: Any,
    query_starts: np.ndarray,
    lists: tuple[np.ndarray, np.ndarray],
    lens: np.ndarray,
    padding: np.ndarray | None = None,
    **given: Any,
) -> Any:
    """paged_attention() over two arrays of pages."""
    said = paged_lists(query_starts, *lists, lens, keys.shape[1], padding)
    cache, pages = in_one_allocation(keys, values, said.pop("block_table"))
    return clattn.paged_attention(q, cache, pages, **said, **given)


def _store(
    where: Any, arrays: dict[str, tuple[Any, Any]], table: np.ndarray, lens: np.ndarray
) -> None:
    """New rows [batch, seqlen_new, heads, size] behind those that the cache has."""
    for name, (new, cache) in arrays.items():
        host_array(new, name, 4)
        if new.dtype != cache.dtype or new.shape[0] != len(table):
            raise InvalidArgument(
                f"{name}: {new.dtype} {list(new.shape)}, legal: {cache.dtype} [{len(table)}, ...]"
            )
        each = new.shape[1]
        store(
            where,
            new.reshape(-1, *new.shape[2:]),
            cache,
            batch_indices=np.repeat(np.arange(len(table), dtype=np.int32), each),
            positions=(lens[:, None] + np.arange(each, dtype=np.int32)).reshape(-1),
            indices=table.reshape(-1),
            indptr=np.arange(len(table) + 1, dtype=np.int32) * np.int32(table.shape[1]),
        )
