"""Merging of attention over parts of the keys, as in flashinfer.cascade."""

from typing import Any

import numpy as np

import clattn
from clattn.errors import InvalidArgument
from clattn.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from clattn.foreign import dense, dtype_name, host_array, library
from clattn.functions import open_device


def _merge(a: tuple[Any, Any], b: tuple[Any, Any], into: tuple[Any, Any], where: Any) -> None:
    tokens, heads, size = a[0].shape
    if tokens == 0:
        return
    clattn.merge_attn_states(
        *where, *into, *a, *b, num_tokens=tokens, num_heads=heads, head_size=size,
        dtype=dtype_name(a[0].dtype, "v"), lse_base=2,
    ).wait()  # fmt: skip


def _state(v: Any, s: Any, dims: int, names: tuple[str, str]) -> tuple[Any, Any]:
    host_array(v, names[0], dims)
    host_array(s, names[1], dims - 1)
    if tuple(s.shape) != tuple(v.shape[:-1]):
        legal = list(v.shape[:-1])
        raise InvalidArgument(f"{names[1]}: shape {list(s.shape)}, legal: {legal}, as {names[0]}'s")
    return dense(v), dense(wide(s))


def wide(array: Any) -> Any:
    """As f32."""
    return array.astype(np.float32) if library(array) is np else array.float()


def merge_state(
    v_a: Any, s_a: Any, v_b: Any, s_b: Any, *, device: str = "", queue: Any = None
) -> tuple[Any, Any]:
    """Attention over two parts of the keys as attention over both: v [tokens, heads, size], s their
    LSEs [tokens, heads], base 2. A part with s = -inf adds nothing."""
    a, b = _state(v_a, s_a, 3, ("v_a", "s_a")), _state(v_b, s_b, 3, ("v_b", "s_b"))
    if a[0].shape != b[0].shape or a[0].dtype != b[0].dtype:
        raise InvalidArgument(
            f"v_b: {b[0].dtype} {list(b[0].shape)}, legal: {a[0].dtype} {list(a[0].shape)}, as v_a"
        )
    merged = library(v_a).empty_like(a[0]), library(v_a).empty_like(a[1])
    _merge(a, b, merged, open_device(device, queue))
    return merged


def merge_state_in_place(
    v: Any,
    s: Any,
    v_other: Any,
    s_other: Any,
    mask: Any = None,
    *,
    device: str = "",
    queue: Any = None,
) -> None:
    """merge_state() into v and s (f32); mask: bool [tokens], False leaves a token as it is."""
    if s.dtype != library(s).float32:
        raise InvalidArgument(f"s: elements of {s.dtype}, legal: float32, since it is written")
    merged = merge_state(v, s, v_other, s_other, device=device, queue=queue)
    rows = slice(None)
    if mask is not None:
        host_array(mask, "mask", 1)
        rows = np.asarray(mask).astype(bool)
        if len(rows) != len(v):
            raise InvalidArgument(f"mask: {len(rows)} values, legal: {len(v)}, one a token")
    v[rows], s[rows] = merged[0][rows], merged[1][rows]


def merge_states(v: Any, s: Any, *, device: str = "", queue: Any = None) -> tuple[Any, Any]:
    """merge_state() of many parts: v [tokens, parts, heads, size], s [tokens, parts, heads].

    Pairs are merged in 32 bits, then pairs of the results. Without parts the output is 0 and the
    LSE -inf.
    """
    module = library(v)
    states = _state(v, s, 4, ("v", "s"))
    if "float" not in str(v.dtype):
        raise InvalidArgument(f"v: elements of {v.dtype}, legal: floats of 32 or 16 bits")
    outputs, lses = wide(states[0]), states[1]
    if v.shape[1] == 0:
        outputs = module.zeros((len(v), 1, *v.shape[2:]), dtype=module.float32)
        lses = module.full((len(v), 1, v.shape[2]), -np.inf, dtype=module.float32)
    while outputs.shape[1] > 1:
        half = outputs.shape[1] // 2
        parts = [
            (
                outputs[:, rows].reshape(-1, *v.shape[2:]),
                lses[:, rows].reshape(-1, v.shape[2]),
            )
            for rows in (slice(0, half), slice(half, 2 * half))
        ]
        merged = merge_state(*parts[0], *parts[1], device=device, queue=queue)
        rest = slice(2 * half, None)
        outputs = module.concatenate(
            (merged[0].reshape(len(v), half, *v.shape[2:]), outputs[:, rest]), 1
        )
        lses = module.concatenate((merged[1].reshape(len(v), half, -1), lses[:, rest]), 1)
    merged = outputs[:, 0]
    return (merged.astype(v.dtype) if module is np else merged.to(v.dtype)), lses[:, 0]


class MultiLevelCascadeAttentionWrapper:
    """Attention over keys that requests share in levels, each over pages of its own.

    Every level is attended to by itself, then merged, as in FlashInfer, so that a window counts
    within each level. clattn.MultiLevelCascadeAttentionWrapper takes device memory, too.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Any = None,
        paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None,
        paged_kv_last_page_len_buf_arr: Any = None,
        *,
        device: str = "",
        queue: Any = None,
    ) -> None:
        if num_levels < 1:
            raise InvalidArgument(f"num_levels: {num_levels}, legal: at least 1")
        self._where = {"device": device, "queue": queue}
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                qo_indptr_buf_arr,
                paged_kv_indptr_buf_arr,
                paged_kv_indices_buf_arr,
                paged_kv_last_page_len_buf_arr,
                **self._where,
            )
            for _ in range(num_levels)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffers: Any = None
    ) -> None:
        """Does nothing: CLAttn takes memory of its own."""

    def plan(
        self,
        qo_indptr_arr: Any,
        paged_kv_indptr_arr: Any,
        paged_kv_indices_arr: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """One list of each kind for every level, as BatchPrefillWithPagedKVCacheWrapper's plan()
        takes them; causal is that of the last level, the others are not."""
        lists = {
            "qo_indptr_arr": qo_indptr_arr, "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }  # fmt: skip
        for name, given in lists.items():
            if len(given) != len(self._levels):
                raise InvalidArgument(f"{name}: {len(given)} levels, legal: {len(self._levels)}")
        for level, arrays in enumerate(zip(*lists.values(), strict=True)):
            self._levels[level].plan(
                *arrays, num_qo_heads, num_kv_heads, head_dim, page_size,
                causal=causal and level == len(self._levels) - 1,
                pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )  # fmt: skip

    begin_forward = plan

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        """out [tokens, num_qo_heads, head_dim] of an array of the host."""
        host_array(q, "q", 3)
        states = [level.run(q, paged_kv_cache, return_lse=True) for level in self._levels]
        out, lse = states[-1]
        for other in states[:-1]:
            merge_state_in_place(out, lse, *other, **self._where)
        return out

    forward = run

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""
