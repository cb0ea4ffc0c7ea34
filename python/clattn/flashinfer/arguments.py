"""FlashInfer's arguments, checked and in CLAttn's words."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clattn.arrays import numbers
from clattn.errors import InvalidArgument, Unsupported
from clattn.foreign import dtype_name, host_array, int32s, only

#: Names of kernels of the same attention; which kernel runs is chosen by the device here.
BACKENDS = ("auto", "fa2", "fa3")


def check_layout(kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):
        raise InvalidArgument(f"kv_layout: {kv_layout!r}, legal: 'NHD' or 'HND'")


def check_common(backend: str, pos_encoding_mode: str, use_fp16_qk_reduction: bool = False) -> None:
    """What every function takes."""
    only("backend", backend, *BACKENDS, because="the others name one vendor's kernels")
    only(
        "pos_encoding_mode", pos_encoding_mode, "NONE", "ALIBI",
        because="rotate queries and keys before the call",
    )  # fmt: skip
    only(
        "use_fp16_qk_reduction", use_fp16_qk_reduction, False,
        because="products of queries and keys are summed in 32 bits",
    )  # fmt: skip


def check_rope(rope_scale: float | None, rope_theta: float | None) -> None:
    because = "only pos_encoding_mode='ROPE_LLAMA' has a use for it, which is not supported"
    only("rope_scale", rope_scale, None, 1.0, because=because)
    only("rope_theta", rope_theta, None, 1e4, because=because)


def refuse(because: str, **given: Any) -> None:
    """Arguments that must be left out."""
    for name, value in given.items():
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            shown = value if isinstance(value, (bool, int, float)) else type(value).__name__
            raise Unsupported(f"{name}: {shown}, legal: nothing: {because}")


def alibi_slopes(heads: int) -> list[float]:
    """One slope a head: 2^(-8 i / n) for n a power of 2, for other n those of 2 n in between
    (Press et al. 2022, "Train Short, Test Long")."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / whole) for i in range(heads - whole)]


def scale_of(value: Any, name: str) -> float:
    """A factor: a number or an array of one; None is 1."""
    if value is None:
        return 1.0
    values = numbers(np.ravel(value), "float32", 1, name)
    if len(values) != 1:
        raise Unsupported(f"{name}: {len(values)} factors, legal: one for all heads")
    return float(value) if isinstance(value, (int, float)) else float(values[0])


def dense_mask(
    custom_mask: Any,
    packed: Any,
    query_lens: np.ndarray,
    key_lens: np.ndarray,
    first_keys: np.ndarray | None = None,
) -> np.ndarray | None:
    """[tokens, keys of the longest request], of masks that lie one after another, flattened; a
    request's keys begin at its first_keys.

    custom_mask: bool [sum of query_lens * key_lens]; packed: the same, eight keys a byte, the first
    in the lowest bit, each request beginning a byte.
    """
    if custom_mask is None and packed is None:
        return None
    if custom_mask is not None and packed is not None:
        raise InvalidArgument("custom_mask, packed_custom_mask: both, legal: one of them")
    name = "custom_mask" if packed is None else "packed_custom_mask"
    given = custom_mask if packed is None else packed
    flat = np.asarray(numbers(given.reshape(-1), "uint8", 1, name))
    sizes = query_lens.astype(np.int64) * key_lens
    sizes_given = sizes if packed is None else (sizes + 7) // 8
    if len(flat) != sizes_given.sum():
        raise InvalidArgument(f"{name}: {len(flat)} values, legal: {sizes_given.sum()}")
    first_keys = np.zeros_like(key_lens) if first_keys is None else first_keys
    longest = int((first_keys + key_lens).max(initial=0))
    if longest == 0:
        return None
    mask = np.zeros((int(query_lens.sum()), longest), np.uint8)
    row = at = 0
    each = zip(query_lens, first_keys, key_lens, sizes, sizes_given, strict=True)
    for queries, first, keys, size, stored in each:
        part = flat[at : at + stored]
        if packed is not None:
            part = np.unpackbits(part, count=size, bitorder="little")
        mask[row : row + queries, first : first + keys] = part.reshape(queries, keys) != 0
        row, at = row + queries, at + stored
    return mask


@dataclass(frozen=True)
class Layer:
    """What plan() says of the layers; `options` are keywords of clattn.attention()."""

    num_qo_heads: int
    causal: bool
    options: dict[str, Any]
    mask: np.ndarray | None = None

    def changed(self, causal: bool | None = None, **arguments: Any) -> "Layer":
        """With other values of arguments that FlashInfer's forward() takes, too."""
        options = dict(self.options)
        for name, value in logit_options(self.num_qo_heads, **arguments).items():
            options.pop(name, None)
            if value is not None:
                options[name] = value
        causal = self.causal if causal is None else causal and self.mask is None
        return replace(self, causal=causal, options=options)

    def with_window(self, window_left: int) -> "Layer":
        options = {name: value for name, value in self.options.items() if name != "window_left"}
        if window_left >= 0:
            options["window_left"] = window_left
        return replace(self, options=options)

    def keywords(self, return_lse: bool = False, key_scale: float = 1.0) -> dict[str, Any]:
        """For attention() and paged_attention(); key_scale: a factor of all logits."""
        if "alibi_slopes" in self.options and return_lse:
            raise Unsupported(
                "return_lse: True, legal with pos_encoding_mode='ALIBI': False: FlashInfer's "
                "biases count from a request's first query, CLAttn's from each token"
            )
        options = dict(self.options)
        if key_scale != 1.0:
            scale = options.get("scale") or options["head_size"] ** -0.5
            options["scale"] = scale * key_scale
        return {"causal": self.causal, "mask": self.mask, "return_lse": return_lse, **options}


def logit_options(
    num_qo_heads: int,
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
) -> dict[str, Any]:
    """Options of AttentionConfig, None = the default."""
    check_common("auto", pos_encoding_mode, use_fp16_qk_reduction)
    check_rope(rope_scale, rope_theta)
    alibi = pos_encoding_mode == "ALIBI"
    if alibi and logits_soft_cap:
        raise Unsupported(
            f"logits_soft_cap: {logits_soft_cap}, legal with pos_encoding_mode='ALIBI': None: "
            "FlashInfer caps the biases, too"
        )
    return {
        "window_left": window_left if window_left >= 0 else None,
        "logits_soft_cap": logits_soft_cap if logits_soft_cap and logits_soft_cap > 0 else None,
        "scale": None if sm_scale is None else float(sm_scale),
        "alibi_slopes": alibi_slopes(num_qo_heads) if alibi else None,
    }


def plan_layer(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    q_data_type: Any,
    kv_data_type: Any = None,
    o_data_type: Any = None,
    causal: bool = False,
    mask: np.ndarray | None = None,
    **logits: Any,
) -> Layer:
    """A Layer of what every plan() takes."""
    dtype = dtype_name("float16" if q_data_type is None else q_data_type, "q_data_type")
    cached = dtype if kv_data_type is None else dtype_name(kv_data_type, "kv_data_type")
    output = dtype if o_data_type is None else dtype_name(o_data_type, "o_data_type")
    only("o_data_type", output, dtype, because="outputs have the type of queries")
    shape = {"num_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_size": head_dim}
    options = {name: int(value) for name, value in shape.items()}
    options["dtype"] = dtype
    if cached != dtype:
        options["kv_cache_dtype"] = cached
    layer = Layer(int(num_qo_heads), bool(causal) and mask is None, options, mask)
    return layer.changed(**logits)


def page_lens(indptr: np.ndarray, last_page_len: Any, page_size: int) -> np.ndarray:
    """Tokens of requests that have the pages indptr[r] to indptr[r + 1] - 1, the last one filled
    up to last_page_len; without pages none, whatever last_page_len says."""
    pages = np.diff(indptr)
    last = int32s(last_page_len, "paged_kv_last_page_len", len(pages))
    wrong = (pages > 0) & ((last < 1) | (last > page_size))
    if wrong.any():
        raise InvalidArgument(f"paged_kv_last_page_len: {last[wrong][0]}, legal: 1 ... {page_size}")
    return np.where(pages > 0, (pages - 1) * page_size + last, 0).astype(np.int32)


def keys_and_values(cache: Any, kv_layout: str) -> tuple[Any, Any]:
    """Views [pages, page_size, heads, size] of a cache: a pair, or [pages, 2, ...]."""
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        keys, values = (host_array(half, "paged_kv_cache", 4) for half in cache)
    else:
        whole = host_array(cache, "paged_kv_cache", 5)
        if whole.shape[1] != 2:
            raise InvalidArgument(
                f"paged_kv_cache: shape {list(whole.shape)}, legal: [pages, 2, ...]"
            )
        keys, values = whole[:, 0], whole[:, 1]
    if kv_layout == "HND":
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    return keys, values
