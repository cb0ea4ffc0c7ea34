"""transformers' attention by CLAttn: attn_implementation="clattn" with a PagedCache."""

from transformers import AttentionInterface, AttentionMaskInterface

from clattn_transformers.attention import attention
from clattn_transformers.cache import PagedCache
from clattn_transformers.masks import row_mask

__all__ = ["PagedCache"]

AttentionInterface.register("clattn", attention)
AttentionMaskInterface.register("clattn", row_mask)
