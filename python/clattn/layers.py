"""What is done to whole models: their kernels compiled, their choices explained."""

from collections.abc import Callable, Iterable
from typing import Any

from clattn import _clattn


def warm_up(
    queue: _clattn.Queue,
    layers: Iterable[_clattn.Attention | _clattn.AttentionImpl],
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Warms every layer or impl up, so that the first request waits for no compiler.

    progress(done, total) is called before the first and after each.
    """
    layers = list(layers)
    if progress is not None:
        progress(0, len(layers))
    for done, layer in enumerate(layers, 1):
        layer.warm_up(queue)
        if progress is not None:
            progress(done, len(layers))


def explain(context: _clattn.Context, **options: Any) -> str:
    """Why a layer of these AttentionOptions runs as it does on a device.

    A line for every backend and kernel that was considered.
    """
    registry = _clattn.LayerRegistry()
    layer = _clattn.Attention(context, registry, _clattn.AttentionOptions(**options))
    return _clattn.format_candidates(layer.explain())
