"""The function that transformers calls for a model with attn_implementation="clattn"."""

import clattn
import torch

from clattn_transformers.cache import PagedKeys


def attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
    softcap=None, s_aux=None, **kwargs,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Stores the step's keys and values [batch, heads, tokens, size] in the cache's pages.

    Gives the attention of the query over the pages, [batch, tokens, heads, size of values]; rows of
    padding are 0. Returns when that is done. A layer that shares another one's keys is given these.
    """
    if not isinstance(key, PagedKeys):
        raise clattn.InvalidArgument(
            "past_key_values: none or of another class, legal: clattn_transformers.PagedCache"
        )
    if not hasattr(key, "cache"):
        raise clattn.Unsupported(
            f"layer {module.layer_idx}: keys computed from those that the cache gave, "
            "legal: these themselves"
        )
    if query.requires_grad or dropout:
        raise clattn.Unsupported("clattn: training, legal: inference under torch.no_grad()")
    cache, layer = key.cache, module.layer_idx
    given = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    cache.check_layer(layer, key.layer, given, s_aux)
    rows = cache.rows(layer, key.shape[0], key.shape[2], attention_mask)
    tokens = query.shape[2]
    query, key, value = (
        rows.pack(tensor.transpose(1, 2))
        for tensor in (rows.fill(query), key.as_subclass(torch.Tensor), value)
    )
    output = query.new_empty(*query.shape[:2], value.shape[2])
    if cache.shares_keys(layer):
        key = value = None
    with clattn.openmp_asleep():
        cache.session.attend(cache.numbers[layer], query, key, value, output)
    return rows.unpack(output)[:, -tokens:], None
