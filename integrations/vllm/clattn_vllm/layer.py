"""A vLLM layer as CLAttn runs it."""

import clattn
import torch
from vllm.v1.attention.backend import AttentionType

from clattn_vllm.device import device

#: CLAttn's names of vLLM's cache types; others are names in both.
_CACHE_DTYPES = {"fp8": "fp8_e4m3", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def _config(impl, dtype: torch.dtype, block_size: int) -> clattn.AttentionConfig:
    """The configuration of a CPUAttentionBackendImpl; its sinks are loaded by then."""
    return clattn.AttentionConfig(
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        block_size=block_size,
        dtype=dtype,
        kv_cache_dtype=_CACHE_DTYPES.get(impl.kv_cache_dtype, impl.kv_cache_dtype),
        scale=impl.scale,
        logits_soft_cap=impl.logits_soft_cap,
        sliding_window=max(impl.sliding_window, 0),
        attn_type=AttentionType(impl.attn_type).value,
        alibi_slopes=[] if impl.alibi_slopes is None else impl.alibi_slopes.tolist(),
        sinks=[] if impl.sinks is None else impl.sinks.float().tolist(),
    )


def refusal(layer, dtype: torch.dtype, block_size: int) -> str:
    """Why CLAttn does not serve a layer; empty: it does."""
    if layer.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        return f"attention of type {AttentionType(layer.attn_type).value}"
    if layer.head_size_v != layer.head_size:
        return f"values of {layer.head_size_v} elements beside keys of {layer.head_size}"
    try:
        config = _config(layer.impl, dtype, block_size)
        clattn.get_attn_backend(config, device().context)
    except clattn.Error as error:
        return str(error)
    return ""


class Layer:
    """The kernels of a layer, and its cache in vLLM's memory."""

    def __init__(self, layer, dtype: torch.dtype, block_size: int) -> None:
        self.name = layer.layer_name
        self.config = _config(layer.impl, dtype, block_size)
        backend = clattn.get_attn_backend(self.config, device().context)
        self.impl = backend.make_impl(device().context, self.config)
        # CPU kernels prefer the tokens of a page side by side; the memory is the same.
        self.keys_by_dim = (
            backend.preferred_layout(device().context) == "HDN"
            and not backend.validate_layout("HDN", self.config, device().context)
        )
        self.writes = layer.kv_sharing_target_layer_name is None
        self.has_cache = layer.attn_type == AttentionType.DECODER
        self._cache: clattn.KVCache | None = None
        self._cache_of: tuple | None = None

    def _shared_cache(self, kv_cache: torch.Tensor, scales: list[float]) -> clattn.KVCache:
        """vLLM's [num_blocks, num_kv_heads, block_size, 2 * head_size], keys in front of values."""
        identity = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), *scales)
        if self._cache_of == identity:
            return self._cache
        blocks, heads, size, _ = kv_cache.shape
        if kv_cache.element_size() == 1:
            kv_cache = kv_cache.view(torch.uint8)
        halves = kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
        key, value = (half.transpose(1, 2) for half in halves)
        if self.keys_by_dim:
            key = halves[0].view(blocks, heads, self.config.head_size, size).permute(0, 3, 1, 2)
        dtype = self.config.kv_cache_dtype
        cache = clattn.KVCache.share(
            device().context, key, value, self.config.dtype if dtype == "auto" else dtype
        )
        if kv_cache.element_size() == 1:
            cache.set_scales(device().context, torch.tensor(scales))
        self._cache, self._cache_of = cache, identity
        return cache

    def forward(self, query, key, value, kv_cache, scales, metadata, output) -> None:
        """Stores the step's keys and values, attends, and returns when that is done."""
        queue = device().queue
        if not self.has_cache:
            self.impl.forward_encoder(queue, query, key, value, output, metadata)
            return
        cache = self._shared_cache(kv_cache, scales)
        if self.writes and key is not None:
            if key.stride(0) != value.stride(0):  # one is a slice of a projection's rows
                key, value = key.contiguous(), value.contiguous()
            self.impl.write_kv_cache(queue, key, value, cache, metadata)
        self.impl.forward(queue, query, output, cache, metadata)
