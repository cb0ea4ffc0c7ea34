"""Attention by one call: attention() and paged_attention()."""

import threading
from typing import Any

import numpy as np

from clattn import _clattn
from clattn.errors import InvalidArgument

_DEVICE_MEMORY = (_clattn.Buffer, _clattn.Tensor)
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
#: By the name that opened them; they live as long as the process.
_opened: dict[str, tuple[_clattn.Context, _clattn.Queue]] = {}
_opening = threading.Lock()


def open_device(
    device: str, queue: tuple[_clattn.Context, _clattn.Queue] | None
) -> tuple[_clattn.Context, _clattn.Queue]:
    """The context and queue of a device, made once."""
    if queue is not None:
        if device:
            raise InvalidArgument(f"device: '{device}', legal with queue: none, the queue has one")
        return queue
    with _opening:
        if device not in _opened:
            context = _clattn.Context(device)
            _opened[device] = context, context.create_queue()
        return _opened[device]


def _joined(array: Any, name: str, written: bool = False) -> Any:
    """[batch, tokens, ...] as [batch * tokens, ...]; never a copy of an array to be written."""
    if array is None or isinstance(array, _DEVICE_MEMORY) or array.ndim != 4:
        return array
    shape = (array.shape[0] * array.shape[1], *array.shape[2:])
    if not written:
        return array.reshape(shape)
    if not isinstance(array, np.ndarray):
        return array.view(shape)  # PyTorch's refuses what would need a copy
    view = array.view()
    try:
        view.shape = shape
    except AttributeError:
        raise InvalidArgument(f"{name}: batches with gaps, legal: one after another") from None
    return view


def _shape(array: Any, name: str) -> tuple[int, ...] | None:
    """The shape of an array; None for device memory, which has none."""
    if isinstance(array, _DEVICE_MEMORY):
        return None
    if not hasattr(array, "shape"):
        raise InvalidArgument(f"{name}: {type(array).__name__}, legal: an array")
    shape = tuple(array.shape)
    if len(shape) not in (3, 4):
        raise InvalidArgument(
            f"{name}: shape {list(shape)}, legal: [tokens, heads, size] or [batch, tokens, heads, "
            "size]"
        )
    return shape


def _same(array: Any, shape: tuple[int, ...], name: str) -> None:
    """Batches of equal lengths are joined, so that one of other lengths would shift the rest."""
    found = _shape(array, name) if array is not None else None
    if found is not None and found[: len(shape)] != shape:
        legal = ", ".join(map(str, shape))
        raise InvalidArgument(f"{name}: shape {list(found)}, legal: [{legal}, ...]")


def _like(array: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """An uninitialised array of the same library."""
    if hasattr(array, "new_empty"):  # PyTorch
        import torch

        return array.new_empty(shape, dtype=torch.float32 if dtype else None)
    return np.empty(shape, dtype or array.dtype)


def _dtype(array: Any) -> str | None:
    name = str(getattr(array, "dtype", "")).removeprefix("torch.")
    return _DTYPES.get(name)


def _starts(batch: int, each: int) -> np.ndarray:
    return np.arange(batch + 1, dtype=np.int32) * np.int32(each)


class _Call:
    """What both functions do around the compiled part."""

    def __init__(self, query: Any, options: dict[str, Any]) -> None:
        self.query, self.options = query, options
        self.shape = _shape(query, "q")
        if self.shape is not None:
            self.option("num_heads", self.shape[-2], "q")
            self.option("head_size", self.shape[-1], "q")
            dtype = _dtype(query)
            if dtype is not None:
                self.option("dtype", dtype, "q")
            elif "dtype" not in options:
                raise InvalidArgument(
                    f"q: elements of {query.dtype}, legal: float32, float16, bfloat16, or bf16 as "
                    "integers of 16 bits with dtype='bf16'"
                )

    def option(self, name: str, found: Any, source: str) -> None:
        """What an array says; an option may repeat it, but not differ."""
        given = self.options.setdefault(name, found)
        if name == "dtype":
            given = _clattn.AttentionConfig(dtype=given).dtype
        if given != found:
            raise InvalidArgument(f"{name}: {given}, legal: {found}, as in {source}")

    def run(self, where: tuple[Any, Any], cache: Any, **given: Any) -> Any:
        """Calls, and returns `out`, or (out, lse)."""
        out, lse, wanted = given.pop("out"), given.pop("lse"), given.pop("return_lse")
        config = _clattn.AttentionConfig(**self.options)
        if self.shape is None and (out is None or (wanted and lse is None)):
            raise InvalidArgument("out or lse: None, legal where q is device memory: a Buffer")
        if self.shape is not None and len(self.shape) == 4:
            _same(out, self.shape[:-1], "out")
        if out is None:
            out = _like(self.query, (*self.shape[:-1], config.output_head_size))
        layout = given["lse_layout"]
        shown = lse
        if wanted and lse is None:
            tokens, heads = self.shape[:-2], self.shape[-2]
            count = int(np.prod(tokens))
            by_heads = layout == "heads"
            lse = _like(self.query, (heads, count) if by_heads else (count, heads), "float32")
            shown = lse.reshape(heads, *tokens) if by_heads else lse.reshape(*tokens, heads)
            if by_heads and len(tokens) == 2:
                shown = shown.swapaxes(0, 1)
        _clattn._attend(
            *where,
            config,
            cache,
            query=_joined(self.query, "q"),
            output=_joined(out, "out", written=True),
            lse=lse,
            **given,
        )
        return (out, shown) if wanted or lse is not None else out


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    query_start_loc: Any = None,
    key_start_loc: Any = None,
    causal: bool = True,
    direction: Any = None,
    span_start_loc: Any = None,
    spans: Any = None,
    first_keys: Any = None,
    keep_keys: Any = None,
    tree_start_loc: Any = None,
    tree_parents: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    lse_layout: str = "tokens",
    lse_base: str = "e",
    mask: Any = None,
    packed_mask: bool = False,
    output_fp8: Any = None,
    output_scale: Any = None,
    device: str = "",
    queue: tuple[_clattn.Context, _clattn.Queue] | None = None,
    **options: Any,
) -> Any:
    """Attention of q over contiguous k and v: softmax(scale * q k^T) v by head.

    q [tokens, num_heads, head_size], k [keys, num_kv_heads, head_size] and v [keys, num_kv_heads,
    head_size_v] are arrays of NumPy or PyTorch (or others by DLPack) on the host, used in place
    where the device can, or Buffers. One more dimension at the front is a batch of equal lengths;
    sequences of unequal lengths are joined, and query_start_loc [sequences + 1] says where each
    starts, as does key_start_loc if there are not as many keys as queries. With causal a token sees
    no key after its own position; the last token has the position of its sequence's last key.

    direction [sequences], instead of causal: 0 = both ways, 1 = causal, 2 = both ways with the
    left window of the first new token (a canvas). spans [number, 2]: first position and one past
    the last of tokens that see one another, such as an image's; sequence s has the rows
    span_start_loc[s] to span_start_loc[s + 1] - 1; the option span_rule says how a window cuts
    them. first_keys [sequences]: the first position that holds a key. keep_keys [sequences]: how
    many first keys neither the window's left side nor chunks hide. tree_parents [nodes]: the
    newest tokens of sequence s are drafts in a tree, the elements tree_start_loc[s] to
    tree_start_loc[s + 1] - 1; each has the number of an earlier one, from 0 in its tree, or -1 (a
    root). CommonAttentionMetadata has all of them, too; what is given here sets the options
    use_directions, use_spans, use_first_keys, use_keep_keys and use_trees.

    Returns out (allocated like q if None), and with return_lse or lse also the log of the softmax
    denominators, f32: lse_layout "tokens" is [tokens, num_heads], "heads" [num_heads, tokens];
    lse_base "e" or "2". mask: bool or uint8 [tokens, keys], True = may attend, or with packed_mask
    eight keys a byte (numpy.packbits(..., bitorder="little")). output_fp8 and output_scale: see
    AttentionImpl.forward. device: "gpu", "cpu", "0:1" or part of a name; its context is opened
    once. queue: (context, queue) of the caller instead, which device memory needs; a call on device
    memory alone returns after enqueueing. options: any field of AttentionConfig, for example
    logits_soft_cap=30.0, alibi_slopes=[...], sinks=[...].
    """
    call = _Call(q, options)
    keys, values = _shape(k, "k"), _shape(v, "v")
    if keys is not None:
        call.option("num_kv_heads", keys[-2], "k")
    if values is not None and keys is not None and values[-1] != keys[-1]:
        call.option("head_size_v", values[-1], "v")
    if keys is not None:
        _same(v, keys[:-1], "v")
    if query_start_loc is None and call.shape is None:
        raise InvalidArgument("query_start_loc: None, legal where q is device memory: numbers")
    if query_start_loc is None:
        batch = call.shape[0] if len(call.shape) == 4 else 1
        query_start_loc = _starts(batch, call.shape[-3])
        if key_start_loc is None and keys is not None:
            key_start_loc = _starts(batch, keys[-3])
            if len(keys) != len(call.shape) or (len(keys) == 4 and keys[0] != batch):
                raise InvalidArgument(f"k: shape {list(keys)}, legal: as many batches as q")
    return call.run(
        open_device(device, queue),
        None,
        shares_cache=False,
        key=_joined(k, "k"),
        value=_joined(v, "v"),
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        seq_lens=None,
        block_table=None,
        page_start_loc=None,
        causal=causal,
        direction=direction,
        span_start_loc=span_start_loc,
        spans=spans,
        first_keys=first_keys,
        keep_keys=keep_keys,
        tree_start_loc=tree_start_loc,
        tree_parents=tree_parents,
        out=out,
        lse=lse,
        return_lse=return_lse,
        lse_layout=lse_layout,
        lse_base=lse_base,
        mask=mask,
        packed_mask=packed_mask,
        output_fp8=output_fp8,
        output_scale=output_scale,
    )


def paged_attention(
    q: Any,
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    query_start_loc: Any = None,
    page_start_loc: Any = None,
    key: Any = None,
    value: Any = None,
    causal: bool = True,
    direction: Any = None,
    span_start_loc: Any = None,
    spans: Any = None,
    first_keys: Any = None,
    keep_keys: Any = None,
    tree_start_loc: Any = None,
    tree_parents: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    lse_layout: str = "tokens",
    lse_base: str = "e",
    mask: Any = None,
    packed_mask: bool = False,
    output_fp8: Any = None,
    output_scale: Any = None,
    device: str = "",
    queue: tuple[_clattn.Context, _clattn.Queue] | None = None,
    **options: Any,
) -> Any:
    """The same over the pages of a cache, a KVCache or a pair of arrays (keys, values).

    The arrays are two views of one allocation, [num_blocks, block_size, num_kv_heads, head_size]
    with any strides, as KVCache.share takes them; values may have fewer elements than keys, if each
    follows its key. block_table: rows of page ids, [sequences,
    columns], or, with page_start_loc [sequences + 1], a list in which sequence s has the pages
    block_table[page_start_loc[s]:page_start_loc[s + 1]]. seq_lens [sequences]: tokens in the
    cache, this call's included. query_start_loc may be left out where each sequence has as many
    tokens as the others. key and value, [tokens, num_kv_heads, head_size or head_size_v], are
    stored first if given. The rest is as in attention(); a cache of latent rows needs use_mla=True.
    """
    call = _Call(q, options)
    where = open_device(device, queue)
    pair = not isinstance(cache, _clattn.KVCache)
    if pair:
        keys, values = cache
        dtype = _dtype(keys) or options.get("kv_cache_dtype") or options.get("dtype", "f16")
        cache = _clattn.KVCache.share(where[0], keys, values, dtype)
    call.option("num_kv_heads", cache.num_kv_heads, "the cache")
    if cache.head_size_v != cache.head_size:
        call.option("head_size_v", cache.head_size_v, "the cache")
    call.option("block_size", cache.block_size, "the cache")
    if query_start_loc is None:
        sequences = len(seq_lens)
        tokens = 0 if call.shape is None else int(np.prod(call.shape[:-2]))
        if call.shape is None or sequences == 0 or tokens % sequences != 0:
            raise InvalidArgument(
                f"query_start_loc: None, legal where q has a multiple of {sequences} tokens, those "
                "of seq_lens"
            )
        query_start_loc = _starts(sequences, tokens // sequences)
    if call.shape is not None and len(call.shape) == 4:
        _same(key, call.shape[:-2], "key")
        _same(value, call.shape[:-2], "value")
    return call.run(
        where,
        cache,
        shares_cache=pair,
        key=_joined(key, "key"),
        value=_joined(value, "value"),
        query_start_loc=query_start_loc,
        key_start_loc=None,
        seq_lens=seq_lens,
        block_table=block_table,
        page_start_loc=page_start_loc,
        causal=causal,
        direction=direction,
        span_start_loc=span_start_loc,
        spans=spans,
        first_keys=first_keys,
        keep_keys=keep_keys,
        tree_start_loc=tree_start_loc,
        tree_parents=tree_parents,
        out=out,
        lse=lse,
        return_lse=return_lse,
        lse_layout=lse_layout,
        lse_base=lse_base,
        mask=mask,
        packed_mask=packed_mask,
        output_fp8=output_fp8,
        output_scale=output_scale,
    )
