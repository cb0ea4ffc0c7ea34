"""transformers' masks, as what CLAttn is told of them: padding, and spans.

Windows and causality are the layers' own. A span is a run of tokens that see one another, such as
those of an image.
"""

from collections.abc import Callable

import clattn
import torch

#: Rows whose masks are compared at once.
_ROWS = 256
#: A layer's sliding window, or None, and its span_rule.
Rule = tuple[int | None, str]


class StepMask(torch.Tensor):
    """What the layers of a step see; of four dimensions, so that models pass it on as it is."""

    padding: torch.Tensor | None  #: [batch, columns], False where a token is padding
    numbers: torch.Tensor | None  #: [batch, columns]: a token's span, -1 = in none; None = no spans
    rules: set[Rule] | None  #: of layers that see what the mask lets them see; None: of all

    def __getitem__(self, index) -> "StepMask":
        """The same: a model cuts rows of masks where it cuts those of queries, which tell which."""
        return self


def _sees(mask_function: Callable, batch: int, rows: torch.Tensor, keys: torch.Tensor):
    """Which tokens see which, padding apart, in the shape [batch, ...] that indices have together.

    rows, keys: columns, of shapes that broadcast.
    """
    shape = torch.broadcast_shapes(rows.shape, keys.shape)
    index = torch.arange(batch).view(-1, *(1 for _ in shape))
    return mask_function(index, torch.tensor(0), rows, keys).expand(batch, *shape)


def _span_numbers(sees_next: torch.Tensor) -> torch.Tensor:
    """The number of each column's span, from whether it sees the column behind it."""
    after_one = torch.nn.functional.pad(sees_next, (1, 0))
    inside = after_one | torch.nn.functional.pad(sees_next, (0, 1))
    return torch.where(inside, (inside & ~after_one).cumsum(1) - 1, -1)


def _rules_of(
    mask_function: Callable, numbers: torch.Tensor, rows: torch.Tensor, window: int | None
) -> set[Rule]:
    """Those by which the rows see exactly what the function says."""
    batch, columns = numbers.shape
    keys = torch.arange(columns)
    rules: set[Rule] = {(None, "whole")}
    if window:
        rules |= {(window, "whole"), (window, "clip_left")}
    for some in rows.split(_ROWS):
        row = some[:, None]
        sees = _sees(mask_function, batch, row, keys)
        same_span = (numbers[:, some, None] == numbers[:, None]) & (numbers[:, None] >= 0)
        rules = {rule for rule in rules if torch.equal(sees, _seen_by(rule, row, keys, same_span))}
    return rules


def _seen_by(rule: Rule, row: torch.Tensor, keys: torch.Tensor, same_span: torch.Tensor):
    """Which keys rows see [batch, rows, columns] in a layer."""
    window, span_rule = rule
    causal = keys <= row
    near = keys > row - window if window else torch.ones_like(causal)
    return (causal & near) | same_span if span_rule == "whole" else (causal | same_span) & near


def row_mask(
    batch_size, q_length, kv_length, q_offset=0, mask_function=None, attention_mask=None,
    use_vmap=False, config=None, **kwargs,
) -> StepMask | None:  # fmt: skip
    """The mask of a step of q_length tokens; None if nothing but causality and windows hides any.

    mask_function says which tokens see which. use_vmap: it is one of the model's own.
    """
    columns = torch.arange(kv_length)
    rows = columns[q_offset:]
    near = columns[max(q_offset - 1, 0) :]
    if not use_vmap and not _sees(mask_function, batch_size, near[:-1], near[1:]).any():
        return None if attention_mask is None else _step_mask(attention_mask, None, None)
    numbers = _span_numbers(_sees(mask_function, batch_size, columns[:-1], columns[1:]))
    rules = _rules_of(mask_function, numbers, rows, getattr(config, "sliding_window", None))
    if not rules:
        raise clattn.Unsupported(
            "mask: one with functions of the model's own, legal: causal, with spans of tokens that "
            "see one another, whole or cut to the left by the window"
        )
    return _step_mask(attention_mask, numbers if (numbers >= 0).any() else None, rules)


def _step_mask(padding, numbers, rules) -> StepMask:
    mask = torch.empty(1, 1, 1, 1).as_subclass(StepMask)
    mask.padding, mask.numbers, mask.rules = padding, numbers, rules
    return mask


def spans_of(numbers: torch.Tensor) -> list[tuple[int, int]]:
    """First and one past the last of each span; numbers [tokens]."""
    values, counts = torch.unique_consecutive(numbers, return_counts=True)
    ends = counts.cumsum(0)
    return [
        (end - count, end)
        for value, count, end in zip(values.tolist(), counts.tolist(), ends.tolist(), strict=True)
        if value >= 0
    ]
