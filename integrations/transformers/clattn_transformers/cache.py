"""transformers' Cache over the pages of a clattn.Session."""

import os
from dataclasses import dataclass

import clattn
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from clattn_transformers import recurrent
from clattn_transformers.layers import layer_arguments, layer_options, layers_of, sharing_targets
from clattn_transformers.masks import StepMask, spans_of

#: A prompt's token ids are unknown here, and without prefix caching nothing reads them.
_TOKEN = 0


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

    def fill(self, query: torch.Tensor) -> torch.Tensor:
        """[batch, heads, tokens, head_size] of the step, 0 for those in front that are left out.

        A model may do that in layers that share keys, where it needs a prompt's last token alone.
        """
        return torch.nn.functional.pad(query, (0, 0, self.tokens - query.shape[2], 0))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, ...] as [rows, ...]."""
        flat = tensor.flatten(0, 1)
        return (flat if self.chosen is None else flat[self.chosen]).contiguous()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[rows, ...] as [batch, tokens, ...], 0 where padding is."""
        if self.chosen is not None:
            flat = packed.new_zeros(self.batch * self.tokens, *packed.shape[1:])
            flat[self.chosen] = packed
            packed = flat
        return packed.unflatten(0, (self.batch, self.tokens))


def _present(batch: int, tokens: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Which of a step's tokens are not padding, from a mask whose last columns are theirs."""
    if mask is None:
        return torch.ones(batch, tokens, dtype=torch.bool)
    return mask[:, -tokens:].bool()


def _spans(numbers: torch.Tensor, mask: torch.Tensor | None) -> list:
    """Those of each row, in its positions, which count no padding."""
    kept = torch.ones_like(numbers).bool() if mask is None else mask.bool()
    return [spans_of(row[some]) for row, some in zip(numbers, kept, strict=True)]


class PagedLayer(CacheLayerMixin):
    """A layer of a PagedCache, which counts the columns of tokens that it was given."""

    def __init__(self, cache: "PagedCache", index: int, config) -> None:
        super().__init__()
        self.cache, self.index, self.config = cache, index, config
        self.reset()

    def reset(self) -> None:
        self.columns = 0
        self.is_initialized = False  # which tells models that a prompt comes

    def lazy_initialization(self, key_states, value_states) -> None:
        """The pages are there."""

    def advance(self, tokens: int) -> None:
        implementation = self.config._attn_implementation
        if implementation != "clattn":
            raise clattn.InvalidArgument(
                f"attn_implementation: {implementation}, legal with a PagedCache: clattn"
            )
        self.columns += tokens
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        self.advance(key_states.shape[-2])
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
    time. reset() makes the cache ready for another batch, also after an error.
    """

    def __init__(
        self, model, *, num_blocks: int = 0, cache_bytes: int = 1 << 30,
        kv_cache_dtype: str = "auto", max_batch: int | None = None, device: str | None = None,
    ) -> None:  # fmt: skip
        """Allocates the pages of all layers: num_blocks of 16 tokens, or what cache_bytes hold.

        model: a decoder of transformers. If it has gated delta nets, these compute by CLAttn from
        now on where they are given a PagedCache; their states take memory for max_batch rows, beams
        included, in addition (None: 8). Larger batches than max_batch are refused. kv_cache_dtype:
        the format of keys and values, by a name that clattn.parse_kv_cache_dtype() takes; int8
        needs session.load_kv_scales() for each layer that keeps keys. device: as clattn.Context
        takes it; None is CLATTN_DEVICE or the CPU. Raises Unsupported for layers, or a format in
        them, that CLAttn does not serve.
        """
        clattn.parse_kv_cache_dtype(kv_cache_dtype)  # which names those that are legal
        modules = layers_of(model)
        config = model.config.get_text_config(decoder=True)
        super().__init__(layers=[PagedLayer(self, i, config) for i in range(len(modules))])
        self._targets = sharing_targets(modules)
        for index in self._targets:
            self.layers[index].supports_early_init = False  # for transformers it holds nothing
        # Of each layer that attends: what its calls pass; its rule, and whether it takes spans.
        self._arguments, self._sees = {}, {}
        #: The session's number of each layer, among those of its kind.
        self.numbers: list[int] = []
        nets, options = [], []
        for module in modules:
            of_kind = nets if recurrent.is_served(module) else options
            self.numbers.append(len(of_kind))
            if of_kind is nets:
                nets.append(recurrent.state_spec(module, model.dtype))
                recurrent.compute_by_clattn(module, PagedCache)
            else:
                options.append(self._options_of(module, model, kv_cache_dtype))
        self._max_batch, states = max_batch, None
        if nets:
            self._max_batch = 8 if max_batch is None else max_batch
            # In a step a request has one more slot than between steps.
            states = clattn.RecurrentLayers(layers=nets, num_slots=2 * self._max_batch)
        self.session = clattn.Session(
            clattn.Context(device or os.environ.get("CLATTN_DEVICE", "cpu")),
            options,
            num_blocks=num_blocks,
            cache_bytes=cache_bytes,
            prefix_caching=False,
            recurrent=states,
        )
        #: The session's number of each row of the batch; None while a row is padding alone.
        self.requests: list[int | None] = []
        self._forget_step()

    def _options_of(self, module, model, kv_cache_dtype: str) -> clattn.AttentionOptions:
        index = module.layer_idx
        target = self._targets.get(index)
        options = layer_options(
            module,
            model,
            kv_cache_dtype=kv_cache_dtype,
            kv_sharing_target_layer_name="" if target is None else f"layers.{self.numbers[target]}",
        )
        self._arguments[index] = layer_arguments(module) | {"sinks": bool(len(options.sinks))}
        self._sees[index] = (options.sliding_window or None, options.span_rule), options.use_spans
        return options

    def _forget_step(self) -> None:
        self._rows: Rows | None = None
        self._columns = 0  # in the cache after the step that _rows are of
        self._now: torch.Tensor | None = None  # [batch, tokens]: which are not padding
        self._numbers: torch.Tensor | None = None  # of its spans

    def shares_keys(self, layer: int) -> bool:
        """Whether the layer reads another one's keys and values."""
        return layer in self._targets

    def check_layer(self, layer: int, keys_of: int, given: dict, sinks) -> None:
        """That a call asks for what the layer was made with."""
        given = given | {"sinks": sinks is not None}
        if given != self._arguments[layer]:
            raise clattn.Unsupported(
                f"layer {layer}: {given} differ from the model's {self._arguments[layer]}"
            )
        owner = self._targets.get(layer, layer)
        if keys_of != owner:
            raise clattn.Unsupported(f"layer {layer}: keys of layer {keys_of}, legal: of {owner}")

    def rows(self, layer: int, batch: int, tokens: int, mask: torch.Tensor | None) -> Rows:
        """The rows of a step of [batch, tokens]; the first of its layers begins it.

        mask: a StepMask, or [batch, columns so far], 0 where a token is padding.
        """
        columns = self.layers[self._targets.get(layer, layer)].columns
        ours = isinstance(mask, StepMask)
        padding, numbers = (mask.padding, mask.numbers) if ours else (mask, None)
        if padding is not None and padding.shape != (batch, columns):
            raise clattn.InvalidArgument(
                f"attention_mask: shape {list(padding.shape)}, legal: {[batch, columns]}, "
                "a column for every token so far"
            )
        if ours:
            self._check_rule(layer, mask)
        now = _present(batch, tokens, padding)
        if columns != self._columns:
            self._begin_step(columns, now, None if numbers is None else _spans(numbers, padding))
            self._numbers = numbers
        self._check_padding(layer, now)
        equal = numbers is self._numbers or (
            None not in (numbers, self._numbers) and torch.equal(numbers, self._numbers)
        )
        if not equal and self._sees[layer][1]:
            raise clattn.Unsupported(
                f"layer {layer}: its mask has other spans than the first layer's, legal: the same"
            )
        return self._rows

    def recurrent_rows(
        self, layer: int, batch: int, tokens: int, mask: torch.Tensor | None
    ) -> Rows:
        """The same for a recurrent layer, whose mask is of the step's tokens: [batch, tokens]."""
        self.layers[layer].advance(tokens)
        columns, now = self.layers[layer].columns, _present(batch, tokens, mask)
        if columns != self._columns:
            self._begin_step(columns, now, None)
        self._check_padding(layer, now)
        return self._rows

    def _check_rule(self, layer: int, mask: StepMask) -> None:
        if mask.rules is None:
            return
        rule, takes_spans = self._sees[layer]
        if rule not in mask.rules or (mask.numbers is not None and not takes_spans):
            raise clattn.Unsupported(
                f"mask: of (window, span_rule) {sorted(mask.rules, key=str)}, legal in layer "
                f"{layer}: {rule}" + ("" if takes_spans else ", without spans")
            )

    def _check_padding(self, layer: int, now: torch.Tensor) -> None:
        """Layers of another kind than the first one's get a mask of their own."""
        if not torch.equal(now, self._now):
            raise clattn.Unsupported(
                f"layer {layer}: its mask has other padding than the first layer's, legal: the same"
            )

    def _begin_step(self, columns: int, now: torch.Tensor, spans: list | None) -> None:
        batch, tokens = now.shape
        if self._max_batch is not None and batch > self._max_batch:
            raise clattn.InvalidArgument(
                f"batch: {batch} rows, legal: up to the cache's max_batch, {self._max_batch}"
            )
        self.requests = self.requests or [None] * batch
        if len(self.requests) != batch:
            raise clattn.InvalidArgument(
                f"batch: {batch} rows, legal: {len(self.requests)}, as before; or reset() the cache"
            )
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
            if spans is not None:
                request.spans = spans[row]
            step.append(request)
        self.session.step(step)
        chosen = None if now.all() else now.flatten().nonzero().squeeze(1)
        self._rows = Rows(batch, tokens, chosen)
        self._columns, self._now, self._numbers = columns, now, None

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
        self.requests = []
        self._forget_step()
        for layer in self.layers:
            layer.reset()

    def _finish(self, requests: set[int | None]) -> None:
        for request in requests - {None}:
            self.session.finish(request)
