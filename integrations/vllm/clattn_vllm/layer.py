"""A vLLM layer as CLAttn runs it."""

import time
from typing import Any

import clattn
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType

from clattn_vllm.device import device

logger = init_logger("vllm.clattn")

#: CLAttn's names of vLLM's cache types; others are names in both.
_CACHE_DTYPES = {"fp8": "fp8_e4m3", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}

#: A layer's configuration as AttentionConfig's arguments, in their order.
Fields = tuple[tuple[str, Any], ...]
_compiled: dict[Fields, clattn.AttentionImpl] = {}


def _fields(impl, dtype: torch.dtype, block_size: int) -> Fields:
    """The configuration of a CPUAttentionBackendImpl; its sinks are loaded by then."""
    fields = {
        "num_heads": impl.num_heads,
        "num_kv_heads": impl.num_kv_heads,
        "head_size": impl.head_size,
        "block_size": block_size,
        "dtype": dtype,
        "kv_cache_dtype": _CACHE_DTYPES.get(impl.kv_cache_dtype, impl.kv_cache_dtype),
        "scale": impl.scale,
        "logits_soft_cap": impl.logits_soft_cap,
        "sliding_window": max(impl.sliding_window, 0),
        "attn_type": AttentionType(impl.attn_type).value,
        "alibi_slopes": () if impl.alibi_slopes is None else tuple(impl.alibi_slopes.tolist()),
        "sinks": () if impl.sinks is None else tuple(impl.sinks.float().tolist()),
    }
    return tuple(fields.items())


def _backend(config: clattn.AttentionConfig) -> clattn.AttentionBackend:
    return clattn.get_attn_backend(config, device().context)


def refusal(layer, dtype: torch.dtype, block_size: int) -> str:
    """Why CLAttn does not serve a layer; empty: it does."""
    if layer.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        return f"attention of type {AttentionType(layer.attn_type).value}"
    if layer.head_size_v != layer.head_size:
        return f"values of {layer.head_size_v} elements beside keys of {layer.head_size}"
    return refused(_fields(layer.impl, dtype, block_size))


def refused(fields: Fields) -> str:
    """Why no backend takes a configuration; empty: one does."""
    try:
        _backend(clattn.AttentionConfig(**dict(fields)))
    except clattn.Error as error:
        return str(error)
    return ""


def compiled(fields: Fields, name: str) -> clattn.AttentionImpl:
    """The kernels of a configuration, ready to launch; layers of equal ones share them.

    The first compilation on a machine takes long enough to be told.
    """
    if fields not in _compiled:
        logger.info("CLAttn compiles attention for %s and layers like it", name)
        start = time.perf_counter()
        config = clattn.AttentionConfig(**dict(fields))
        impl = _backend(config).make_impl(device().context, config)
        impl.warm_up(device().queue)
        _compiled[fields] = impl
        kernels = ", ".join(sorted({kernel.name for kernel in impl.kernels()}))
        logger.info(
            "CLAttn serves attention on %s, ready after %.1f s: %s",
            device().context.capabilities.name, time.perf_counter() - start, kernels,
        )  # fmt: skip
    return _compiled[fields]


def make_builder(
    config: clattn.AttentionConfig, vllm_config: VllmConfig
) -> clattn.AttentionMetadataBuilder:
    scheduler = vllm_config.scheduler_config
    options = clattn.BuilderOptions(
        max_num_reqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        workspace=device().workspace,
    )
    return _backend(config).make_builder(device().context, config, options)


def _of_one_stride(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slices of a projection's rows, or copies where the slices differ in stride."""
    if key.stride(0) == value.stride(0):
        return key, value
    return key.contiguous(), value.contiguous()


class Layer:
    """The kernels of a layer, and its cache in vLLM's memory."""

    def __init__(self, layer, dtype: torch.dtype, block_size: int) -> None:
        self._fields, self._name = _fields(layer.impl, dtype, block_size), layer.layer_name
        self.impl = compiled(self._fields, self._name)
        self.config = self.impl.config
        self.writes = layer.kv_sharing_target_layer_name is None
        self.has_cache = layer.attn_type == AttentionType.DECODER
        self._cache: clattn.KVCache | None = None
        self._cache_of: tuple | None = None

    def kernels(self, directed: bool) -> clattn.AttentionImpl:
        """directed: for batches in which causality differs from request to request.

        Only some models bring such batches, so the first one compiles them.
        """
        if not directed:
            return self.impl
        return compiled((*self._fields, ("use_directions", True)), self._name)

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
        dtype = self.config.kv_cache_dtype
        cache = clattn.KVCache.share(
            device().context, key, value, self.config.dtype if dtype == "auto" else dtype
        )
        if kv_cache.element_size() == 1:
            cache.set_scales(device().context, torch.tensor(scales))
        self._cache, self._cache_of = cache, identity
        return cache

    def store(self, key, value, kv_cache, scales, slots) -> None:
        """Writes keys and values [tokens, num_kv_heads, head_size] where the slots say."""
        cache = self._shared_cache(kv_cache, scales)
        dtype = self.config.dtype
        with clattn.openmp_asleep():
            clattn.reshape_and_cache_flash(
                device().context, device().queue, *_of_one_stride(key, value), cache, slots, dtype
            )

    def forward(
        self, query, key, value, kv_cache, scales, metadata, output, directed: bool = False
    ) -> None:
        """Stores the step's keys and values, attends, and returns when that is done."""
        queue = device().queue
        impl = self.kernels(directed)
        if not self.has_cache:
            with clattn.openmp_asleep():
                impl.forward_encoder(queue, query, key, value, output, metadata)
            return
        cache = self._shared_cache(kv_cache, scales)
        if not self.writes:
            key = value = None
        elif key is not None:
            key, value = _of_one_stride(key, value)
        with clattn.openmp_asleep():
            impl.forward(queue, query, output, cache, metadata, key=key, value=value)
