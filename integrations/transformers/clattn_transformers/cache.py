"""transformers' Cache over the pages of a clattn.Session."""

import inspect
import os
from dataclasses import dataclass

import clattn
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from clattn_transformers.masks import SpanMask, spans_of

#: A prompt's token ids are unknown here, and without prefix caching nothing reads them.
_TOKEN = 0
#: Its prefix is a span that windows leave whole. What follows is causal, though its layers call
#: themselves not causal.
_PREFIX_MODEL = "paligemma"


class PagedKeys(torch.Tensor):
    """A step's keys, which tell the attention function where they belong."""

    cache: "PagedCache"
    layer: int


@dataclass
class Rows:
    """Which tokens of [batch, tokens] a step computes: all but padding."""

    batch: int
    tokens: int
    chosen: torch.Tensor | None  # of the flattened batch; None is all

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, tokens, head_size] as [rows, heads, head_size]."""
        flat = tensor.transpose(1, 2).flatten(0, 1)
        return (flat if self.chosen is None else flat[self.chosen]).contiguous()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_size] as [batch, tokens, heads, head_size], 0 where padding is."""
        if self.chosen is not None:
            flat = packed.new_zeros(self.batch * self.tokens, *packed.shape[1:])
            flat[self.chosen] = packed
            packed = flat
        return packed.unflatten(0, (self.batch, self.tokens))


def layer_arguments(module) -> dict:
    """What a model's attention module passes to its attention function."""
    return {
        "scaling": module.scaling,
        "sliding_window": getattr(
            module, "sliding_window", getattr(module.config, "sliding_window", None)
        ),
        "softcap": getattr(module, "attn_logit_softcapping", None),
    }


def takes_spans(model) -> bool:
    """Whether token types say which of the model's tokens see one another."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


def span_options(model, window: int | None) -> dict:
    """Those of a layer with this window."""
    if not takes_spans(model):
        return {}
    cut = window and model.config.model_type != _PREFIX_MODEL
    return {"use_spans": True, "span_rule": "clip_left" if cut else "whole"}


def layer_options(module, model) -> clattn.AttentionOptions:
    """A layer as CLAttn runs it, from a model's attention module."""
    config = module.config
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else "full_attention"
    causal = module.is_causal or model.config.model_type == _PREFIX_MODEL
    if kind not in ("full_attention", "sliding_attention") or not causal:
        raise clattn.Unsupported(
            f"layer {module.layer_idx}: type {kind}, causal {causal}, "
            "legal: causal full_attention or sliding_attention"
        )
    arguments = layer_arguments(module)
    sinks = getattr(module, "sinks", None)
    return clattn.AttentionOptions(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=module.head_dim,
        dtype=model.dtype,
        scale=arguments["scaling"],
        sliding_window=arguments["sliding_window"] or 0,
        logits_soft_cap=arguments["softcap"] or 0.0,
        sinks=[] if sinks is None else sinks.detach().float().tolist(),
        **span_options(model, arguments["sliding_window"]),
    )


class PagedLayer(CacheLayerMixin):
    """A layer of a PagedCache, which counts the columns of tokens that it was given."""

    def __init__(self, cache: "PagedCache", index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.reset()

    def reset(self) -> None:
        self.columns = 0
        self.is_initialized = False  # which tells models that a prompt comes

    def lazy_initialization(self, key_states, value_states) -> None:
        """The pages are there."""

    def update(self, key_states, value_states, *args, **kwargs):
        self.columns += key_states.shape[-2]
        self.is_initialized = True
        keys = key_states.as_subclass(PagedKeys)
        keys.cache, keys.layer = self.cache, self.index
        return keys, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """The keys and values of one batch of a model, in pages of a clattn.Session.

    Rows of the batch are requests of the session; padding takes no place in it. For one thread at a
    time. reset() makes the cache ready for another batch.
    """

    def __init__(
        self, model, *, num_blocks: int = 0, cache_bytes: int = 1 << 30, device: str | None = None
    ) -> None:
        """Allocates the pages of all layers: num_blocks of 16 tokens, or what cache_bytes hold.

        model: a decoder of transformers. device: as clattn.Context takes it; None is CLATTN_DEVICE
        or the CPU. Raises Unsupported for layers that CLAttn does not serve.
        """
        modules = [
            module for module in model.modules()
            if hasattr(module, "layer_idx") and hasattr(module, "scaling")
        ]  # fmt: skip
        modules.sort(key=lambda module: module.layer_idx)
        if [module.layer_idx for module in modules] != list(range(len(modules))) or not modules:
            raise clattn.Unsupported(
                f"model: {type(model).__name__} has attention in layers "
                f"{[module.layer_idx for module in modules]}, legal: once in every layer"
            )
        super().__init__(layers=[PagedLayer(self, index) for index in range(len(modules))])
        self.arguments = [layer_arguments(module) for module in modules]
        self.has_sinks = [getattr(module, "sinks", None) is not None for module in modules]
        options = [layer_options(module, model) for module in modules]
        self.rules = [(layer.sliding_window or None, layer.span_rule) for layer in options]
        context = clattn.Context(device or os.environ.get("CLATTN_DEVICE", "cpu"))
        self.session = clattn.Session(
            context,
            options,
            num_blocks=num_blocks,
            cache_bytes=cache_bytes,
            prefix_caching=False,
        )
        #: The session's number of each row of the batch; None while a row is padding alone.
        self.requests: list[int | None] = []
        self._rows: Rows | None = None
        self._numbers: torch.Tensor | None = None  # of the spans of the step that _rows are of
        self._columns = 0  # in the cache after that step

    def check_layer(self, layer: int, given: dict, sinks) -> None:
        """That a call asks for what the layer was made with."""
        if given != self.arguments[layer] or (sinks is not None) != self.has_sinks[layer]:
            raise clattn.Unsupported(
                f"layer {layer}: {given} (sinks: {sinks is not None}) differ from the model's "
                f"{self.arguments[layer]} (sinks: {self.has_sinks[layer]})"
            )

    def rows(self, layer: int, batch: int, tokens: int, mask: torch.Tensor | None) -> Rows:
        """The rows of a step of [batch, tokens]; the first of its layers begins it.

        mask: a SpanMask, or [batch, columns so far], 0 where a token is padding.
        """
        columns = self.layers[layer].columns
        numbers = None
        if isinstance(mask, SpanMask):
            self._check_rule(layer, mask)
            mask, numbers = mask.padding, mask.numbers
        if columns != self._columns:
            if mask is not None and mask.shape != (batch, columns):
                raise clattn.InvalidArgument(
                    f"attention_mask: shape {list(mask.shape)}, legal: {[batch, columns]}, "
                    "a column for every token so far"
                )
            self._rows = self._begin_step(batch, tokens, mask, numbers)
            self._columns, self._numbers = columns, numbers
        equal = numbers is self._numbers or (
            None not in (numbers, self._numbers) and torch.equal(numbers, self._numbers)
        )
        if not equal:
            raise clattn.Unsupported(
                f"layer {layer}: its mask has other spans than the first layer's, legal: the same"
            )
        return self._rows

    def _check_rule(self, layer: int, mask: SpanMask) -> None:
        if self.rules[layer] not in mask.rules:
            raise clattn.Unsupported(
                f"mask: of (window, span_rule) {sorted(mask.rules, key=str)}, legal in layer "
                f"{layer}: {self.rules[layer]}"
            )

    def _begin_step(
        self, batch: int, tokens: int, mask: torch.Tensor | None, numbers: torch.Tensor | None
    ) -> Rows:
        self.requests = self.requests or [None] * batch
        if len(self.requests) != batch:
            raise clattn.InvalidArgument(
                f"batch: {batch} rows, legal: {len(self.requests)}, as before; or reset() the cache"
            )
        now = torch.ones(batch, tokens, dtype=torch.bool)
        if mask is not None:
            now = mask[:, -tokens:].bool()
        step = []
        for row, count in enumerate(now.sum(1).tolist()):
            if not count:
                continue
            request = clattn.StepRequest()
            if self.requests[row] is None:
                self.requests[row] = self.session.add([_TOKEN] * count)
            else:
                request.new_tokens = [_TOKEN] * count
            request.id = self.requests[row]
            if numbers is not None:
                whole = numbers[row]
                request.spans = spans_of(whole if mask is None else whole[mask[row].bool()])
            step.append(request)
        self.session.step(step)
        return Rows(batch, tokens, None if now.all() else now.flatten().nonzero().squeeze(1))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Makes row i what row indices[i] was; rows that come twice share pages."""
        kept: set[int] = set()
        selected = [self.requests[index] for index in indices.tolist()]
        for row, request in enumerate(selected):
            if request in kept:
                selected[row] = self.session.fork(request)
            elif request is not None:
                kept.add(request)
        self._finish(set(self.requests) - kept)
        self.requests = selected

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.requests)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        raise clattn.Unsupported("crop: a PagedCache only grows, legal: reset()")

    def reset(self) -> None:
        self._finish(set(self.requests))
        self.requests, self._rows, self._columns = [], None, 0
        for layer in self.layers:
            layer.reset()

    def _finish(self, requests: set[int | None]) -> None:
        for request in requests - {None}:
            self.session.finish(request)
