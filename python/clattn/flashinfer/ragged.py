"""Prefill over keys and values without pages, as in flashinfer.prefill."""

from typing import Any

import numpy as np

import clattn
from clattn.errors import InvalidArgument
from clattn.flashinfer.arguments import dense_mask, plan_layer, refuse, scale_of
from clattn.flashinfer.wrapper import (
    HEAD_SCALES,
    ITEMS,
    JIT,
    SPLITS,
    Wrapper,
    check_lens,
    check_most,
    check_rows,
    lse_words,
    scaled,
)
from clattn.foreign import DEVICE_MEMORY, only, starts


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Tokens of each request over its keys, requests one after another.

    See wrapper.Wrapper for the workspace, `device` and `queue`. As in FlashInfer, k and v are
    [keys, heads, size] whatever kv_layout says; "HND" is refused, so that nobody takes them for
    [heads, keys, size].
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
        *,
        device: str = "",
        queue: Any = None,
    ) -> None:
        refuse(JIT, variant_owns_mask=variant_owns_mask)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend=backend,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
            graph_buffers={
                "qo_indptr_buf": qo_indptr_buf,
                "kv_indptr_buf": kv_indptr_buf,
                "custom_mask_buf": custom_mask_buf,
                "mask_indptr_buf": mask_indptr_buf,
            },
            device=device,
            queue=queue,
        )
        only("kv_layout", kv_layout, "NHD", because="keys are [keys, heads, size]")

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
        qo_indptr_cpu: Any = None,
        kv_indptr_cpu: Any = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Request r has the rows qo_indptr[r] to qo_indptr[r + 1] - 1 of q, and kv_indptr's of k
        and v. Masks and what is said twice are as in the paged wrapper's plan()."""
        del non_blocking
        refuse(SPLITS, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv)
        refuse(HEAD_SCALES, use_token_head_sf=use_token_head_sf)
        refuse(
            ITEMS, prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        query_starts = starts(qo_indptr, "qo_indptr")
        key_starts = starts(kv_indptr, "kv_indptr", len(query_starts) - 1)
        check_lens(qo_indptr_cpu, query_starts, "qo_indptr_cpu")
        check_lens(o_indptr, query_starts, "o_indptr")
        check_lens(kv_indptr_cpu, key_starts, "kv_indptr_cpu")
        check_lens(v_indptr, key_starts, "v_indptr")
        query_lens, key_lens = np.diff(query_starts), np.diff(key_starts)
        check_lens(seq_lens_q, query_lens, "seq_lens_q")
        check_lens(seq_lens, key_lens, "seq_lens")
        check_most(max_token_per_sequence, query_lens, "max_token_per_sequence")
        check_most(max_sequence_kv, key_lens, "max_sequence_kv")
        check_most(uniform_q_len, query_lens, "uniform_q_len")
        layer = plan_layer(
            num_qo_heads, num_kv_heads, head_dim_qk, causal=causal,
            mask=dense_mask(custom_mask, packed_custom_mask, query_lens, key_lens),
            q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
            pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction,
            window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        if head_dim_vo is not None and head_dim_vo != head_dim_qk:
            layer.options["head_size_v"] = head_dim_vo
        self._layer, self._query_starts, self._key_starts = layer, query_starts, key_starts

    begin_forward = plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """out [tokens, num_qo_heads, head_dim_vo], or with return_lse (out, lse); lse_base and
        lse_layout as in the paged wrapper. q, k and v are arrays, or device memory, with out a
        Buffer. enable_pdl is a hint for one vendor's devices."""
        del enable_pdl
        refuse(HEAD_SCALES, kv_cache_sf=kv_cache_sf)
        only("o_scale", o_scale, None, 1.0, because="outputs have the type of queries")
        layer = self._planned()
        factor = scale_of(q_scale, "q_scale") * scale_of(k_scale, "k_scale")
        return self._attend(
            layer.keywords(return_lse, factor), q, k, v, v_scale=v_scale, out=out, lse=lse,
            **lse_words(lse_base, lse_layout),
        )  # fmt: skip

    def _attend(
        self, keywords: dict[str, Any], q: Any, k: Any, v: Any, v_scale: Any, lse: Any, **given: Any
    ) -> Any:
        check_rows(q, self._query_starts)
        for name, array in {"k": k, "v": v}.items():
            if not isinstance(array, DEVICE_MEMORY) and array.shape[0] < self._key_starts[-1]:
                raise InvalidArgument(
                    f"{name}: {array.shape[0]} rows, legal: at least {self._key_starts[-1]}"
                )
        result = clattn.attention(
            q,
            k,
            v,
            query_start_loc=self._query_starts,
            key_start_loc=self._key_starts,
            lse=lse,
            **given,
            **keywords,
            **self._where,
        )
        only_out = lse is not None and not keywords["return_lse"]
        return scaled(result[0] if only_out else result, v_scale)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """run() with these in the place of plan()'s, as FlashInfer's does (deprecated there)."""
        layer = self._planned(
            causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            use_fp16_qk_reduction=use_fp16_qk_reduction, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        keywords = layer.keywords(return_lse)
        return self._attend(keywords, q, k, v, v_scale=None, lse=None, lse_base="2")
