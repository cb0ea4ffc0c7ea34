"""What the modules with other libraries' names (flashinfer, flash_attn) share.

Arrays are NumPy's or PyTorch's, on the host. What those libraries take and CLAttn cannot do is
refused by name, never ignored.
"""

from typing import Any

import numpy as np

from clattn import _clattn
from clattn.arrays import numbers, same_allocation
from clattn.errors import InvalidArgument, Unsupported

DEVICE_MEMORY = (_clattn.Buffer, _clattn.Tensor)


def only(name: str, value: Any, *legal: Any, because: str) -> None:
    """Refuses a value of an argument that has no meaning here but those."""
    if isinstance(value, (bool, int, float, str, tuple)) and value in legal:
        return
    if value is None and None in legal:
        return
    shown = value if isinstance(value, (bool, int, float, str, tuple)) else type(value).__name__
    choices = " or ".join(repr(choice) for choice in legal)
    raise Unsupported(f"{name}: {shown!r}, legal: {choices}: {because}")


def host_array(array: Any, name: str, dims: int) -> Any:
    """Refuses what is no array of the host with so many dimensions."""
    if isinstance(array, DEVICE_MEMORY) or not hasattr(array, "shape"):
        raise InvalidArgument(f"{name}: {type(array).__name__}, legal: an array of the host")
    if getattr(array, "requires_grad", False):
        raise Unsupported(f"{name}: requires a gradient, legal: none: there is no backward pass")
    if array.ndim != dims:
        raise InvalidArgument(
            f"{name}: shape {list(array.shape)}, legal: an array of {dims} dimensions"
        )
    return array


def library(array: Any) -> Any:
    """The module of an array: NumPy or PyTorch."""
    if hasattr(array, "new_empty"):
        import torch

        return torch
    return np


def like(array: Any, values: np.ndarray) -> Any:
    """Values of NumPy as an array of another's library."""
    module = library(array)
    return values if module is np else module.from_numpy(values)


def dense(array: Any) -> Any:
    """Without gaps; a copy if it has some."""
    return np.ascontiguousarray(array) if library(array) is np else array.contiguous()


def dtype_name(given: Any, name: str) -> str:
    """CLAttn's name of an element type: a name, NumPy's type or PyTorch's."""
    text = given if isinstance(given, str) else getattr(given, "__name__", None) or str(given)
    text = text.removeprefix("torch.")
    names = {
        **{"float16": "f16", "half": "f16", "bfloat16": "bf16", "float32": "f32", "float": "f32"},
        **{"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"},
    }
    text = names.get(text, text)
    if text not in names.values():
        raise InvalidArgument(f"{name}: {given}, legal: {', '.join(names)}")
    return text


def stored_bytes(array: Any) -> Any:
    """8-bit floats as the bytes that NumPy and DLPack's readers know."""
    return array.view(library(array).uint8) if "float8" in str(array.dtype) else array


def int32s(given: Any, name: str, size: int | None = None) -> np.ndarray:
    """A list or array of integers, [size]."""
    values = numbers(given, "int32", 1, name)
    if size is not None and len(values) != size:
        raise InvalidArgument(f"{name}: {len(values)} values, legal: {size}")
    return values


def starts(given: Any, name: str, sequences: int | None = None) -> np.ndarray:
    """Prefix sums [sequences + 1] from 0, such as of tokens."""
    values = int32s(given, name, None if sequences is None else sequences + 1)
    if len(values) == 0 or values[0] != 0 or (np.diff(values) < 0).any():
        raise InvalidArgument(f"{name}: {values.tolist()}, legal: ascending numbers from 0")
    return values


def lists_of(
    table: np.ndarray, lens: np.ndarray, page_size: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of page ids as lists: where each request's begins, and the pages in use. What a row
    holds behind them is the caller's."""
    if len(table) != len(lens):
        raise InvalidArgument(f"{name}: {len(table)} rows, legal: {len(lens)}, one a request")
    counts = -(-lens // page_size)
    most = counts.max(initial=0)
    if table.shape[1] < most:
        raise InvalidArgument(f"{name}: {table.shape[1]} columns, legal: at least {most}")
    used = np.arange(table.shape[1]) < counts[:, None]
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32), table[used]


def paged_lists(
    query_starts: np.ndarray,
    page_starts: np.ndarray,
    pages: np.ndarray,
    lens: np.ndarray,
    page_size: int,
    first_keys: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Keywords of clattn.paged_attention().

    It wants as many keys as tokens. A request with fewer gets pages in front that hold no key, so
    that the last token keeps the position of the last key.
    """
    missing = np.maximum(np.diff(query_starts) - lens, 0)
    front = -(-missing // page_size)
    if front.any():
        pages = np.insert(pages, np.repeat(page_starts[:-1], front), 0)
        page_starts = page_starts + np.concatenate(([0], np.cumsum(front)))
        first_keys = front * page_size + (0 if first_keys is None else first_keys)
    lists = {"block_table": pages, "page_start_loc": page_starts, "query_start_loc": query_starts}
    lists["seq_lens"] = lens + front * page_size
    if first_keys is not None:
        lists["first_keys"] = first_keys
    return {name: values.astype(np.int32) for name, values in lists.items()}


def in_one_allocation(
    keys: Any, values: Any, pages: np.ndarray
) -> tuple[tuple[Any, Any], np.ndarray]:
    """Pages of keys and values as a cache that attention reads, and the numbers of `pages` in it.

    A cache is one allocation. Of two, the pages in use are copied into one.
    """
    if same_allocation(keys, values) is not False:
        return (keys, values), pages
    used, numbers_of = np.unique(pages, return_inverse=True)
    if len(used) == 0:
        used = np.zeros(1, np.int32)  # a cache has at least one page
    outside = used[(used < 0) | (used >= len(keys))]
    if len(outside) != 0:
        raise InvalidArgument(f"pages: {outside[0]}, legal: 0 ... {len(keys) - 1}")
    both = library(keys).stack((keys[used], values[used]), 1)
    return (both[:, 0], both[:, 1]), numbers_of.astype(np.int32).reshape(pages.shape)


def store(where: tuple[Any, Any], rows: Any, cache: Any, **lists: Any) -> None:
    """Copies rows [tokens, heads, size] into [pages, page_size, heads, size] of their type.

    lists: those of clattn.append_paged_kv_cache(). The array takes the part of the keys and of the
    values at once, so that it does not matter where the other half of the cache is.
    """
    if cache.itemsize == 1:  # elements of 8 bits are copied two at a time
        rows, cache = (array.view(library(array).uint16) for array in (rows, cache))
    dtype = "bf16" if "uint16" in str(cache.dtype) else dtype_name(cache.dtype, "cache")
    half = _clattn.KVCache.share(where[0], cache, cache, dtype)
    _clattn.append_paged_kv_cache(*where, rows, rows, dtype, half, **lists).wait()
