"""Latent attention (MLA) where vLLM would take CPU_MLA or AMX_MLA: decode by CLAttn.

Prefill is vLLM's own. CPU_MLA's multiplies the latent rows into keys and values of each head and
has no page to read then; AMX_MLA's has weights of its own packing around it.
"""

import clattn
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backends.mla.amx_mla import (
    AMXMLABackend,
    AMXMLAImpl,
    AMXMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from clattn_vllm.device import device
from clattn_vllm.layer import Fields, compiled, make_builder, refused

logger = init_logger("vllm.clattn")


class _DecodeBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's metadata, and CLAttn's of the requests that decode beside it."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.builder: clattn.AttentionMetadataBuilder | None = None
        layers = get_layers_from_vllm_config(vllm_config, MLAAttention, layer_names)
        dtype = vllm_config.model_config.dtype
        for layer in layers.values():
            fields = _fields(layer.impl, dtype, kv_cache_spec.block_size)
            why = refused(fields)
            if why:
                logger.warning_once("CLAttn leaves layers to vLLM's own attention: %s", why)
                continue
            layer.impl.served = compiled(fields, layer.layer_name)
            if self.builder is None:
                self.builder = make_builder(layer.impl.served.config, vllm_config)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> MLACommonMetadata:
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        if self.builder is not None and metadata.decode is not None:
            decodes = metadata.num_decodes
            batch = clattn.CommonAttentionMetadata(
                common.query_start_loc[: decodes + 1],
                common.seq_lens[:decodes],
                common.block_table_tensor[:decodes],
                slot_mapping=common.slot_mapping[: metadata.num_decode_tokens],
            )
            metadata.decode.clattn = self.builder.build(
                device().queue, batch, fast_build=fast_build
            )
        return metadata


class _Decode(MLACommonImpl[MLACommonMetadata]):
    """A layer's attention; served is None where decode is vLLM's own."""

    served: clattn.AttentionImpl | None = None
    _cache: clattn.KVCache | None = None
    _cache_of: tuple | None = None

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        rows = kv_c_and_k_pe_cache  # [num_blocks, block_size, head_size]
        if self.served is None:
            return super().forward_mqa(q, rows, attn_metadata, layer)
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        identity = (rows.data_ptr(), rows.shape)
        if self._cache_of != identity:
            row = rows.unsqueeze(2)  # keys and values at once
            self._cache = clattn.KVCache.share(device().context, row, row, q.dtype)
            self._cache_of = identity
        output = q.new_empty(q.shape[0], self.num_heads, self.kv_lora_rank)
        q = q.contiguous()
        with clattn.openmp_asleep():
            self.served.forward(
                device().queue, q, output, self._cache, attn_metadata.decode.clattn
            )
        return output, None


class CPUImpl(_Decode, CPUMLAImpl):
    """CPU_MLA's layer."""


class AMXImpl(_Decode, AMXMLAImpl):
    """AMX_MLA's layer."""


class AMXBuilder(_DecodeBuilder, AMXMLAMetadataBuilder):
    """AMX_MLA's metadata, which its prefill reads."""


class CLAttnMLABackend(CPUMLABackend):
    """vLLM's CPU_MLA, by CLAttn."""

    @staticmethod
    def get_impl_cls() -> type[CPUImpl]:
        return CPUImpl

    @staticmethod
    def get_builder_cls() -> type[_DecodeBuilder]:
        return _DecodeBuilder


class CLAttnAMXMLABackend(AMXMLABackend):
    """vLLM's AMX_MLA, by CLAttn."""

    @staticmethod
    def get_impl_cls() -> type[AMXImpl]:
        return AMXImpl

    @staticmethod
    def get_builder_cls() -> type[AMXBuilder]:
        return AMXBuilder


def _fields(impl: _Decode, dtype: torch.dtype, block_size: int) -> Fields:
    fields = {
        "num_heads": impl.num_heads,
        "num_kv_heads": 1,
        "head_size": impl.head_size,
        "block_size": block_size,
        "dtype": dtype,
        "scale": impl.scale,
        "use_mla": True,
        "rope_dim": impl.qk_rope_head_dim,
    }
    return tuple(fields.items())
