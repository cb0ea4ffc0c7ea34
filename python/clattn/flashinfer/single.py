"""One request with keys and values of its own, as in flashinfer.decode and flashinfer.prefill."""

from typing import Any

import numpy as np

import clattn
from clattn.flashinfer.arguments import (
    Layer,
    check_common,
    check_layout,
    dense_mask,
    plan_layer,
    refuse,
    scale_of,
)
from clattn.flashinfer.wrapper import HEAD_SCALES, scaled
from clattn.foreign import dense, host_array


def contiguous(k: Any, v: Any, kv_layout: str) -> tuple[Any, Any]:
    """[keys, heads, size] of either layout; HND is copied."""
    check_layout(kv_layout)
    keys, values = host_array(k, "k", 3), host_array(v, "v", 3)
    if kv_layout == "HND":
        keys, values = dense(keys.swapaxes(0, 1)), dense(values.swapaxes(0, 1))
    return keys, values


def single_layer(query: Any, keys: Any, **arguments: Any) -> Layer:
    """A Layer of what arrays say."""
    return plan_layer(
        query.shape[1], keys.shape[1], query.shape[2], q_data_type=query.dtype, **arguments
    )


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    device: str = "",
    queue: Any = None,
) -> Any:
    """One token over its keys: q [num_qo_heads, head_dim], k and v as kv_layout says.

    Returns out [num_qo_heads, head_dim], or with return_lse (out, lse [num_qo_heads], base 2).
    use_tensor_cores is a hint that is not needed here: the device decides.
    """
    del use_tensor_cores
    query = host_array(q, "q", 2)[None]
    keys, values = contiguous(k, v, kv_layout)
    layer = single_layer(
        query, keys,
        pos_encoding_mode=pos_encoding_mode, window_left=window_left, sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
    )  # fmt: skip
    factor = scale_of(q_scale, "q_scale") * scale_of(k_scale, "k_scale")
    keywords = layer.keywords(return_lse, factor)
    result = clattn.attention(
        query, keys, values, query_start_loc=[0, 1], key_start_loc=[0, len(keys)],
        lse_base="2", device=device, queue=queue, **keywords,
    )  # fmt: skip
    result = scaled(result, v_scale)
    return tuple(array[0] for array in result) if return_lse else result[0]


def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    device: str = "",
    queue: Any = None,
) -> Any:
    """q [qo_len, num_qo_heads, head_dim_qk] over k and v as kv_layout says; the last query has the
    position of the last key.

    A mask takes the place of causal: custom_mask bool [qo_len, kv_len], or packed_custom_mask, the
    same flattened, eight keys a byte, the first in the lowest bit. Returns out, or with return_lse
    (out, lse [qo_len, num_qo_heads], base 2).
    """
    refuse("queries in 8 bits are not supported", scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
    refuse(HEAD_SCALES, kv_cache_sf=kv_cache_sf)
    check_common(backend, pos_encoding_mode)
    query = host_array(q, "q", 3)
    keys, values = contiguous(k, v, kv_layout)
    lens = np.array([len(query)]), np.array([len(keys)])
    layer = single_layer(
        query, keys, causal=causal, o_data_type=o_dtype,
        mask=dense_mask(custom_mask, packed_custom_mask, *lens),
        pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction,
        window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale, rope_theta=rope_theta,
    )  # fmt: skip
    result = clattn.attention(
        query, keys, values, query_start_loc=[0, len(query)], key_start_loc=[0, len(keys)],
        lse_base="2", device=device, queue=queue,
        **layer.keywords(return_lse, scale_of(k_scale, "k_scale")),
    )  # fmt: skip
    return scaled(result, v_scale)


def single_prefill_with_kv_cache_return_lse(*args: Any, **kwargs: Any) -> Any:
    return single_prefill_with_kv_cache(*args, **{**kwargs, "return_lse": True})
