"""The function that transformers calls for a model with attn_implementation="clattn"."""

import clattn
import torch

from clattn_transformers.cache import PagedKeys


def attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
    softcap=None, s_aux=None, **kwargs,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Stores the step's keys and values [batch, heads, tokens, head_size] in the cache's pages.

    Gives the attention of the query over the pages, [batch, tokens, heads, head_size]; rows of
    padding are 0. Returns when that is done.
    """
    if not isinstance(key, PagedKeys):
        raise clattn.InvalidArgument(
            "past_key_values: none or of another class, legal: clattn_transformers.PagedCache"
        )
    if query.requires_grad or dropout:
        raise clattn.Unsupported("clattn: training, legal: inference under torch.no_grad()")
    given = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    key.cache.check_layer(key.layer, given, s_aux)
    rows = key.cache.rows(key.layer, query.shape[0], query.shape[2], attention_mask)
    packed = [rows.pack(tensor) for tensor in (query, key.as_subclass(torch.Tensor), value)]
    output = torch.empty_like(packed[0])
    with clattn.openmp_asleep():
        key.cache.session.attend(key.layer, *packed, output)
    return rows.unpack(output), None
