"""Prefill, over pages here, as in flashinfer.prefill."""

from typing import Any

import numpy as np

from clattn.flashinfer.arguments import dense_mask, plan_layer, refuse
from clattn.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from clattn.flashinfer.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from clattn.flashinfer.wrapper import (
    HEAD_SCALES,
    ITEMS,
    JIT,
    SKIPS,
    SPLITS,
    PagedWrapper,
    check_lens,
    check_most,
)
from clattn.foreign import only

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """New tokens of each request over its pages, which hold their keys and values already.

    See wrapper.Wrapper for the workspace, `device` and `queue`.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
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
                "paged_kv_indptr_buf": paged_kv_indptr_buf,
                "paged_kv_indices_buf": paged_kv_indices_buf,
                "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
                "custom_mask_buf": custom_mask_buf,
                "mask_indptr_buf": mask_indptr_buf,
                "max_total_num_rows": max_total_num_rows,
            },
            device=device,
            queue=queue,
        )

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
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
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Request r has the rows qo_indptr[r] to qo_indptr[r + 1] - 1 of q and the pages
        paged_kv_indices[paged_kv_indptr[r]:paged_kv_indptr[r + 1]].

        A mask takes the place of causal: bool [sum of queries times keys], or packed, each request
        beginning a byte. Lengths that are said twice must agree. non_blocking has no meaning here:
        the lists are read before plan() returns.
        """
        del non_blocking
        refuse(SPLITS, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv)
        refuse("pages are given as lists", block_tables=block_tables)
        refuse(HEAD_SCALES, use_token_head_sf=use_token_head_sf)
        refuse(
            ITEMS, prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        only(
            "head_dim_vo", head_dim_vo, None, head_dim_qk,
            because="values of another size follow their keys in pages: clattn.paged_attention",
        )  # fmt: skip
        self._take_pages(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size,
            seq_lens,
        )  # fmt: skip
        query_lens = np.diff(self._query_starts)
        check_lens(seq_lens_q, query_lens, "seq_lens_q")
        check_most(max_token_per_sequence, query_lens, "max_token_per_sequence")
        check_most(max_sequence_kv, self._key_lens, "max_sequence_kv")
        check_most(uniform_q_len, query_lens, "uniform_q_len")
        self._layer = plan_layer(
            num_qo_heads, num_kv_heads, head_dim_qk, causal=causal,
            mask=dense_mask(
                custom_mask, packed_custom_mask, query_lens, self._key_lens,
                self._lists.get("first_keys"),
            ),
            q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
            pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction,
            window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """out, or with return_lse (out, lse). lse_base: "log2" or "ln"; lse_layout: "NH" is
        [tokens, num_qo_heads], "HN" the transpose. window_left takes the place of the plan's.

        q: an array [tokens, num_qo_heads, head_dim] or device memory, with paged_kv_cache a
        clattn.KVCache and out a Buffer. enable_pdl is a hint for one vendor's devices.
        """
        del enable_pdl
        refuse(SKIPS, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        refuse(HEAD_SCALES, kv_cache_sf=kv_cache_sf)
        refuse("softmax is computed in 32 bits", use_fp16_softmax=use_fp16_softmax)
        refuse("there is no such kernel", uses_spcompress=uses_spcompress)
        layer = self._planned()
        if window_left is not None:
            layer = layer.with_window(window_left)
        return self._run(
            q, paged_kv_cache, layer, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            out=out, lse=lse, return_lse=return_lse, sinks=sinks, lse_base=lse_base,
            lse_layout=lse_layout,
        )  # fmt: skip

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
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
        return self._run(
            q, paged_kv_cache, layer, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse
        )
