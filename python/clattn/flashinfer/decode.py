"""Decode, as in flashinfer.decode."""

from typing import Any

from clattn.flashinfer.arguments import plan_layer, refuse
from clattn.flashinfer.single import single_decode_with_kv_cache
from clattn.flashinfer.wrapper import HEAD_SCALES, SKIPS, SPLITS, PagedWrapper
from clattn.foreign import only

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "single_decode_with_kv_cache"]


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """One token of each request (or q_len_per_req) over its pages.

    use_tensor_cores is a hint that is not needed here. See wrapper.Wrapper for the workspace.
    """

    _rows_by = "q_len_per_req"

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        device: str = "",
        queue: Any = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend=backend,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
            graph_buffers={
                "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
                "paged_kv_indices_buffer": paged_kv_indices_buffer,
                "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
            },
            device=device,
            queue=queue,
        )
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """The pages of request r are indices[indptr[r]:indptr[r + 1]].

        data_type, if given, is both types. seq_lens, if given, must be what the lists say.
        non_blocking has no meaning here: the lists are read before plan() returns.
        """
        del non_blocking
        refuse(SPLITS, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv)
        refuse("pages are given as lists", block_tables=block_tables)
        refuse(HEAD_SCALES, use_token_head_sf=use_token_head_sf)
        only("window_right", window_right, 0, because="decoded tokens see no later key")
        causal = q_len_per_req > 1
        only("is_causal", is_causal, None, causal, because="several tokens of a request are causal")
        if data_type is not None:
            q_data_type, kv_data_type = data_type, kv_data_type or data_type
        self._take_pages(q_len_per_req, indptr, indices, last_page_len, page_size, seq_lens)
        self._layer = plan_layer(
            num_qo_heads, num_kv_heads, head_dim, causal=causal,
            q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        self._window_left, self._q_len_per_req = window_left, q_len_per_req

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """out, or with return_lse (out, lse [tokens, num_qo_heads], base 2).

        q: an array [tokens, num_qo_heads, head_dim] or device memory, with paged_kv_cache a
        clattn.KVCache and out a Buffer. enable_pdl is a hint for one vendor's devices.
        """
        del enable_pdl
        layer = self._planned()
        because = "plan() was given that"
        only("window_left", window_left, None, self._window_left, because=because)
        only("q_len_per_req", q_len_per_req, None, self._q_len_per_req, because=because)
        refuse(SKIPS, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        refuse(HEAD_SCALES, kv_cache_sf=kv_cache_sf)
        return self._run(
            q, paged_kv_cache, layer, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            out=out, lse=lse, return_lse=return_lse, sinks=sinks,
        )  # fmt: skip

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: Any = None,
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
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self._run(
            q, paged_kv_cache, layer, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            return_lse=return_lse,
        )  # fmt: skip
