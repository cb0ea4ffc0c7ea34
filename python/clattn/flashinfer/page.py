"""Where new tokens go, and storing them, as in flashinfer.page."""

import math
from typing import Any

import numpy as np

import clattn
from clattn.errors import InvalidArgument
from clattn.flashinfer.arguments import check_layout, keys_and_values, page_lens
from clattn.foreign import (
    DEVICE_MEMORY,
    dtype_name,
    host_array,
    int32s,
    like,
    starts,
    store,
)
from clattn.functions import open_device


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """int32 [requests]: tokens in the pages of each request."""
    pages = np.diff(starts(kv_indptr, "kv_indptr"))
    last = int32s(kv_last_page_len, "kv_last_page_len", len(pages))
    return like(kv_indptr, (np.maximum(pages - 1, 0) * np.int32(page_size) + last).astype(np.int32))


def get_batch_indices_positions(
    append_indptr: Any, seq_lens: Any, nnz: int, batch_indices: Any = None, positions: Any = None
) -> tuple[Any, Any]:
    """int32 [nnz] each: the request of every new token and its position there. The new ones are the
    last of their sequences; seq_lens count them. Past them batch_indices is -1 and positions 0
    (as it was in a given array)."""
    begins = starts(append_indptr, "append_indptr")
    lens = int32s(seq_lens, "seq_lens", len(begins) - 1)
    counts = np.diff(begins)
    if begins[-1] > nnz:
        raise InvalidArgument(f"nnz: {nnz}, legal: at least {begins[-1]}, as in append_indptr")
    if (counts > lens).any():
        raise InvalidArgument("seq_lens: less than the new tokens, legal: with those")
    request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    token = np.arange(begins[-1], dtype=np.int32)
    new = {"batch_indices": request, "positions": (lens - begins[1:])[request] + token}
    given = {"batch_indices": batch_indices, "positions": positions}
    results = []
    for name, rest in {"batch_indices": -1, "positions": 0}.items():
        result = given[name]
        if result is None:
            result = like(append_indptr, np.zeros(nnz, np.int32))
        elif tuple(host_array(result, name, 1).shape) != (nnz,) or "int32" not in str(result.dtype):
            found = f"{result.dtype} {list(result.shape)}"
            raise InvalidArgument(f"{name}: {found}, legal: int32 [{nnz}]")
        if given[name] is None or rest:
            result[:] = rest
        result[: len(token)] = like(result, new[name].astype(np.int32))
        results.append(result)
    return results[0], results[1]


def _lists(
    batch_indices: Any, positions: Any, kv_indices: Any, kv_indptr: Any, last: Any, page_size: int
) -> dict[str, Any]:
    """Those of clattn.append_paged_kv_cache(); no token may lie behind its request's last one."""
    begins = starts(kv_indptr, "kv_indptr")
    lens = page_lens(begins, last, page_size)
    request, at = int32s(batch_indices, "batch_indices"), int32s(positions, "positions")
    if len(at) != len(request):
        raise InvalidArgument(f"positions: {len(at)} values, legal: {len(request)}, one a token")
    wrong = (request >= len(lens)) | (request < -1)
    if wrong.any():
        raise InvalidArgument(f"batch_indices: {request[wrong][0]}, legal: -1 ... {len(lens) - 1}")
    held = request >= 0  # -1: nothing is stored
    behind = (at[held] < 0) | (at[held] >= lens[request[held]])
    if behind.any():
        raise InvalidArgument(
            f"positions: {at[held][behind][0]}, legal: 0 ... {lens[request[held]][behind][0] - 1}, "
            "as kv_indptr and kv_last_page_len say"
        )
    indices = int32s(kv_indices, "kv_indices")
    return {"batch_indices": request, "positions": at, "indices": indices, "indptr": begins}


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    *,
    device: str = "",
    queue: Any = None,
) -> None:
    """Stores rows [tokens, num_kv_heads, head_dim] at positions of requests (-1: of none).

    The lists count the new tokens. paged_kv_cache: arrays, or a clattn.KVCache, which takes rows in
    device memory, too (of the cache's type).
    """
    check_layout(kv_layout)
    where = open_device(device, queue)
    if isinstance(paged_kv_cache, clattn.KVCache):
        cache = paged_kv_cache
        given = isinstance(append_key, DEVICE_MEMORY)
        dtype = cache.dtype if given else dtype_name(append_key.dtype, "append_key")
        lists = _lists(
            batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, cache.block_size
        )
        done = clattn.append_paged_kv_cache(*where, append_key, append_value, dtype, cache, **lists)
        if not given:
            done.wait()
        return
    halves = keys_and_values(paged_kv_cache, kv_layout)
    lists = _lists(
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, halves[0].shape[1]
    )
    _store_each(where, {"append_key": append_key, "append_value": append_value}, halves, lists)


def append_paged_mla_kv_cache(
    append_ckv: Any,
    append_kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    *,
    device: str = "",
    queue: Any = None,
) -> None:
    """Stores latent rows [tokens, ckv_dim] and [tokens, kpe_dim] in [pages, page_size, dim] each;
    a cache of None gets nothing."""
    rows, halves = {}, []
    for name, array, cache in (
        ("append_ckv", append_ckv, ckv_cache),
        ("append_kpe", append_kpe, kpe_cache),
    ):
        if cache is not None:
            size = math.gcd(host_array(array, name, 2).shape[1], 256)
            host_array(cache, name.removeprefix("append_") + "_cache", 3)
            rows[name] = array.reshape(len(array), -1, size)  # as heads of a size that is stored
            halves.append(cache.reshape(*cache.shape[:2], -1, size))
    if not halves:
        raise InvalidArgument("ckv_cache, kpe_cache: None, legal: at least one array")
    lists = _lists(
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, halves[0].shape[1]
    )
    _store_each(open_device(device, queue), rows, halves, lists)


def _store_each(where: Any, rows: dict[str, Any], halves: Any, lists: dict[str, Any]) -> None:
    for (name, array), half in zip(rows.items(), halves, strict=True):
        host_array(array, name, 3)
        if array.dtype != half.dtype:
            raise InvalidArgument(f"{name}: {array.dtype}, legal: {half.dtype}, as the cache's")
        store(where, array, half, **lists)
