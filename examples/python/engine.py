#!/usr/bin/env python3
"""The engine of examples/engine in Python: the same model, the same steps, the same tokens."""

import clattn
import numpy as np
from model import (
    HEADS, KV_HEADS, LAYERS, SIZE, random_prompt, random_weights, rms_norm, rope, silu,
)  # fmt: skip


def forward(session, step, weights):
    """The likeliest next token of each request of the step."""
    x = weights["embedding"][step.token_ids]
    for i in range(LAYERS):
        w = {name: weights[f"{i}.{name}"] for name in ("qkv", "out", "gate_up", "down")}
        qkv = (rms_norm(x, weights[f"{i}.norm_1"]) @ w["qkv"]).reshape(len(x), -1, SIZE)
        query, key, value = np.split(qkv, (HEADS, HEADS + KV_HEADS), 1)
        query, key = rope(query, step.positions), rope(key, step.positions)
        attended = np.empty_like(query)
        session.attend(i, query, key, np.ascontiguousarray(value), attended)
        x = x + attended.reshape(len(x), -1) @ w["out"]
        gate, up = np.split(rms_norm(x, weights[f"{i}.norm_2"]) @ w["gate_up"], 2, 1)
        x = x + (silu(gate) * up) @ w["down"]
    logits = rms_norm(x, weights["norm"]) @ weights["head"]
    return [int(logits[step.last_row(i)].argmax()) for i in range(len(step.seq_lens))]


def main():
    weights = random_weights(1)
    layer = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "dtype": "f32"}
    layers = [clattn.AttentionOptions(**layer) for _ in range(LAYERS)]
    session = clattn.Session(clattn.Context(), layers, cache_bytes=1 << 20)
    prompts = [random_prompt(45, 0), random_prompt(40, 5)]  # 35 tokens are alike
    added = [[], []]
    batch = [clattn.StepRequest(id=session.add(prompts[0]))]
    while len(added[1]) < 20:
        tokens = forward(session, session.step(batch), weights)
        if len(batch) == 1:  # the other one joins at the next step
            batch.append(clattn.StepRequest(id=session.add(prompts[1])))
        for i, token in enumerate(tokens):
            added[i].append(token)
            batch[i].new_tokens = [token]
    shared = session.block_table(batch[0].id)[1] == session.block_table(batch[1].id)[1]
    print("the prompts share their first blocks:", "yes" if shared else "no")
    for tokens in added:
        print(*tokens)


if __name__ == "__main__":
    main()
