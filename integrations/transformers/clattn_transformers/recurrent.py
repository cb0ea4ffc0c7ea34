"""Gated delta nets by CLAttn, with their states in the slots of a clattn.Session."""

import functools

import clattn
import torch

#: transformers' classes whose arithmetic this is.
SERVED = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


def is_served(module) -> bool:
    return type(module).__name__ in SERVED


def state_spec(net, dtype: torch.dtype) -> clattn.KVCacheSpec:
    """What a slot holds of a layer: the convolution's last inputs, and the state in f32."""
    if net.activation not in ("silu", "swish"):
        raise clattn.Unsupported(
            f"layer {net.layer_idx}: hidden_act {net.activation}, legal in a gated delta net: silu"
        )
    states = clattn.gated_delta_net_state_shape(
        net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim, net.conv_kernel_size, 0,
        dtype,
    )  # fmt: skip
    return clattn.KVCacheSpec(kind="mamba", states=states)


def compute_by_clattn(net, cache_class: type) -> None:
    """Makes a model's module compute by CLAttn where it is given such a cache.

    transformers has no registry of functions for these layers, as it has for attention.
    """
    before = net.forward  # the class's, or a hook's of those who spread models over devices
    if getattr(before, "func", None) is not _forward_by_cache:
        net.forward = functools.partial(_forward_by_cache, net, before, cache_class)


def _forward_by_cache(
    net, before, cache_class, hidden_states, cache=None, attention_mask=None, **kwargs
):
    """At the module's top, so that models can be pickled."""
    if isinstance(cache, cache_class):
        return _forward(net, hidden_states, cache, attention_mask)
    return before(hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)


def _projections(net, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of rows: query, key and value side by side, the gate of the norm, a and b."""
    if hasattr(net, "in_proj_qkvz"):
        given = net.in_proj_qkvz(packed)[None], net.in_proj_ba(packed)[None]
        query, key, value, z, b, a = net.fix_query_key_value_ordering(*given)
        mixed = torch.cat([part[0].flatten(1) for part in (query, key, value)], dim=-1)
        return mixed, z[0].flatten(1), a[0], b[0]
    projections = (net.in_proj_qkv, net.in_proj_z, net.in_proj_a, net.in_proj_b)
    return tuple(projection(packed) for projection in projections)


def _forward(net, hidden_states: torch.Tensor, cache, mask: torch.Tensor | None) -> torch.Tensor:
    """hidden_states [batch, tokens, hidden_size]; mask [batch, tokens], 0 where padding is."""
    if hidden_states.requires_grad:
        raise clattn.Unsupported("clattn: training, legal: inference under torch.no_grad()")
    batch, tokens, _ = hidden_states.shape
    rows = cache.recurrent_rows(net.layer_idx, batch, tokens, mask)
    mixed, z, a, b = _projections(net, rows.pack(hidden_states))
    out = torch.empty_like(z)
    with clattn.openmp_asleep():
        cache.session.recur(
            cache.numbers[net.layer_idx],
            lambda step: _recur(net, cache.session, step, mixed, a, b, out),
        )
        clattn.rms_norm_gated(
            cache.session.context, cache.session.queue, out, out, net.norm.weight.detach(), z,
            num_tokens=len(z), num_heads=net.num_v_heads, width=net.head_v_dim, dtype=z.dtype,
            weight_dtype=net.norm.weight.dtype, eps=net.norm.variance_epsilon,
            activation=getattr(net.norm, "activation", "silu"),
        )  # fmt: skip
    return rows.unpack(net.out_proj(out))


def _recur(net, session, step, mixed, a, b, out) -> None:
    """Convolution and gated delta rule, of prompts and of decodes.

    Which rows are which the step's metadata says: causal_conv1d_update() is causal_conv1d_fn() by
    another name, and the rule takes rows in chunks where a request has enough of them.
    """
    weight = net.conv1d.weight.detach().squeeze(1)
    convolved = torch.empty_like(mixed)
    clattn.causal_conv1d_fn(
        session.context, session.queue, mixed, weight, convolved, step.conv_states,
        step.conv_metadata, dtype=mixed.dtype, weight_dtype=weight.dtype,
        width=net.conv_kernel_size,
    )  # fmt: skip
    query, key, value = convolved.split([net.key_dim, net.key_dim, net.value_dim], dim=1)
    clattn.chunk_gated_delta_rule(
        session.context, session.queue, query, key, value, out, step.states, step.metadata,
        dtype=mixed.dtype, num_k_heads=net.num_k_heads, a=a, b=b, gate_dtype=a.dtype,
        A_log=net.A_log.detach().float(), dt_bias=net.dt_bias.detach().float(),
    )  # fmt: skip
