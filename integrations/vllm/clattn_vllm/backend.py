"""The classes that vLLM asks for; what they do not serve is left to those that they derive from."""

from dataclasses import dataclass, field

import clattn
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from clattn_vllm.device import device
from clattn_vllm.layer import Layer, make_builder, refusal

logger = init_logger("vllm.clattn")


class CLAttnBackend(CPUAttentionBackend):
    """vLLM's CPU_ATTN, by CLAttn."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type["CLAttnImpl"]:
        return CLAttnImpl

    @staticmethod
    def get_builder_cls() -> type["CLAttnMetadataBuilder"]:
        return CLAttnMetadataBuilder


@dataclass
class CLAttnMetadata:
    """A step: CLAttn's metadata by sliding window, and vLLM's for the layers that it runs."""

    num_actual_tokens: int
    causal: bool = True  #: of all requests; what drafters that look both ways ask for is False
    directed: bool = False  #: whether causality differs from request to request
    by_window: dict[int, clattn.AttentionMetadata] = field(default_factory=dict)
    vllm: CPUAttentionMetadata | None = None


class CLAttnMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the steps of a group of layers that share a block table."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.served: dict[int, Layer] = {}  # the first layer of each window
        self.builders: dict[tuple[int, bool], clattn.AttentionMetadataBuilder] = {}
        self.left_to_vllm = False
        for layer in layers.values():
            self._take(layer)

    def _take(self, layer: Attention) -> None:
        why = refusal(layer, self.dtype, self.block_size)
        if why:
            logger.warning_once("CLAttn leaves layers to vLLM's own attention: %s", why)
            self.left_to_vllm = True
            return
        served = layer.impl.served = Layer(layer, self.dtype, self.block_size)
        window = served.config.sliding_window
        if window not in self.served:
            self.served[window] = served
            self._builder(window, False)

    def _builder(self, window: int, directed: bool) -> clattn.AttentionMetadataBuilder:
        if (window, directed) not in self.builders:
            config = self.served[window].kernels(directed).config
            self.builders[window, directed] = make_builder(config, self.vllm_config)
        return self.builders[window, directed]

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> CLAttnMetadata:
        common = common_attn_metadata
        directed = isinstance(common.causal, torch.Tensor)
        metadata = CLAttnMetadata(common.num_actual_tokens, common.causal is True, directed)
        if self.left_to_vllm:
            metadata.vllm = super().build(common_prefix_len, common, fast_build)
        if not self.served:
            return metadata
        paged = not self.is_encoder_only_attention
        batch = clattn.CommonAttentionMetadata(
            common.query_start_loc[: common.num_reqs + 1],
            common.seq_lens[: common.num_reqs],
            common.block_table_tensor[: common.num_reqs] if paged else None,
            slot_mapping=common.slot_mapping if paged else None,
            causal=None if directed else common.causal,
            # False and True are the directions 0, both ways, and 1, causal.
            direction=common.causal[: common.num_reqs].to(torch.uint8) if directed else None,
        )
        for window in self.served:
            metadata.by_window[window] = self._builder(window, directed).build(
                device().queue, batch, fast_build=fast_build
            )
        return metadata


class CLAttnImpl(CPUAttentionBackendImpl):
    """A layer's attention; served is None where it is vLLM's own."""

    served: Layer | None = None

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Stores keys and values that no query comes with, such as a drafter's of its context."""
        if self.served is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        scales = [layer._k_scale_float, layer._v_scale_float]
        self.served.store(key, value, kv_cache, scales, slot_mapping)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output,
        output_scale=None, output_block_scale=None,
    ) -> torch.Tensor:  # fmt: skip
        if attn_metadata is None:  # a run that measures memory
            return output
        if self.served is None:
            if self.kv_sharing_target_layer_name is None and key is not None:
                slots = attn_metadata.vllm.slot_mapping
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata.vllm, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("CLAttn: fused output quantization")
        tokens = attn_metadata.num_actual_tokens
        self.served.forward(
            query[:tokens],
            None if key is None else key[:tokens],
            None if value is None else value[:tokens],
            kv_cache,
            [layer._k_scale_float, layer._v_scale_float],
            attn_metadata.by_window[self.served.config.sliding_window],
            output[:tokens],
            attn_metadata.directed,
        )
        return output
