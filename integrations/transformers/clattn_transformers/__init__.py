"""transformers' attention by CLAttn: attn_implementation="clattn" with a PagedCache."""

from transformers import AttentionInterface, AttentionMaskInterface

from clattn_transformers.attention import attention, padding_mask
from clattn_transformers.cache import PagedCache

__all__ = ["PagedCache"]

AttentionInterface.register("clattn", attention)
AttentionMaskInterface.register("clattn", padding_mask)
