"""What a model's layers are, as CLAttn runs them."""

import inspect

import clattn

from clattn_transformers import recurrent

#: Its prefix is a span that windows leave whole. What follows is causal, though its layers call
#: themselves not causal.
_PREFIX_MODEL = "paligemma"


def layers_of(model) -> list:
    """The modules that attend or keep a state, one for each layer."""
    decoder = model.get_decoder()  # without the layers that look at images
    numbered = [module for module in decoder.modules() if hasattr(module, "layer_idx")]
    found = [
        module for module in numbered
        if hasattr(module, "scaling") or recurrent.is_served(module)
    ]  # fmt: skip
    found.sort(key=lambda module: module.layer_idx)
    indices = [module.layer_idx for module in found]
    number = model.config.get_text_config(decoder=True).num_hidden_layers
    if indices != list(range(number)):
        odd = next(index for index in range(number) if indices.count(index) != 1)
        there = [type(module).__name__ for module in numbered if module.layer_idx == odd]
        raise clattn.Unsupported(
            f"model: layer {odd} of {type(model).__name__} has {there or 'nothing'}, legal in "
            f"every layer: attention, once, or one of {', '.join(recurrent.SERVED)}"
        )
    return found


def sharing_targets(modules: list) -> dict[int, int]:
    """Of each layer that reads another one's keys and values: which one's."""
    shared, owners = {}, {}
    for module in modules:
        kind = getattr(module, "layer_type", None)
        if getattr(module, "is_kv_shared_layer", False):
            shared[module.layer_idx] = owners[kind]
        else:
            owners[kind] = module.layer_idx
    return shared


def config_of(module):
    """The configuration of the module's layer, as layers may differ."""
    layers = getattr(module.config, "per_layer_config", None)
    return layers[module.layer_idx] if layers else module.config


def kind_of(module) -> str:
    kinds = getattr(module.config, "layer_types", None)
    return kinds[module.layer_idx] if kinds else "full_attention"


def layer_arguments(module) -> dict:
    """What a model's attention module passes to its attention function."""
    window = getattr(module, "sliding_window", getattr(config_of(module), "sliding_window", None))
    if getattr(module.config, "layer_types", None) and kind_of(module) == "full_attention":
        window = None  # that of other layers
    return {
        "scaling": module.scaling,
        "sliding_window": window,
        "softcap": getattr(module, "attn_logit_softcapping", None),
    }


def _takes_spans(model, kind: str) -> bool:
    """Whether token types say which of the model's tokens see one another in layers of the kind."""
    parameters = inspect.signature(model.forward).parameters
    if "token_type_ids" in parameters:
        return True
    # Gemma 4's full layers are causal. Other models tell images apart for their positions alone.
    config = model.config.get_text_config(decoder=True)
    both_ways = getattr(config, "use_bidirectional_attention", None) == "vision"
    return both_ways and "mm_token_type_ids" in parameters and kind == "sliding_attention"


def _span_options(model, kind: str, window: int | None) -> dict:
    """Those of a layer with this window."""
    if not _takes_spans(model, kind):
        return {}
    cut = window and model.config.model_type != _PREFIX_MODEL
    return {"use_spans": True, "span_rule": "clip_left" if cut else "whole"}


def _head_size(module) -> int:
    size = getattr(module, "head_dim", getattr(module, "head_size", None))
    if size is None:  # as in latent attention
        raise clattn.Unsupported(
            f"layer {module.layer_idx}: {type(module).__name__} has no head_dim, legal: attention "
            "whose keys are what it stores"
        )
    return size


def layer_options(module, model, **cache_options) -> clattn.AttentionOptions:
    """A layer as CLAttn runs it, from a model's attention module."""
    kind = kind_of(module)
    causal = module.is_causal or model.config.model_type == _PREFIX_MODEL
    if kind not in ("full_attention", "sliding_attention") or not causal:
        raise clattn.Unsupported(
            f"layer {module.layer_idx}: type {kind}, causal {causal}, "
            "legal: causal full_attention or sliding_attention"
        )
    num_heads = config_of(module).num_attention_heads
    arguments = layer_arguments(module)
    sinks = getattr(module, "sinks", None)
    return clattn.AttentionOptions(
        num_heads=num_heads,
        num_kv_heads=num_heads // getattr(module, "num_key_value_groups", 1),
        head_size=_head_size(module),
        head_size_v=getattr(module, "v_head_dim", 0),
        dtype=model.dtype,
        scale=arguments["scaling"],
        sliding_window=arguments["sliding_window"] or 0,
        logits_soft_cap=arguments["softcap"] or 0.0,
        sinks=[] if sinks is None else sinks.detach().float().tolist(),
        **_span_options(model, kind, arguments["sliding_window"]),
        **cache_options,
    )
