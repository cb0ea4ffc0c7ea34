"""Attention of one request in double precision, for tests of other libraries' names."""

import numpy as np


def attention(
    q, k, v, *, causal=False, scale=None, left=-1, right=-1, cap=0.0, mask=None, slopes=None,
    sinks=None, first=0,
):  # fmt: skip
    """q [tokens, heads, size], k and v [keys, kv heads, size]: the output and the natural logs of
    the softmax denominators, [tokens, heads]. The last query has the position of the last key."""
    tokens, heads, size = q.shape
    keys = len(k)
    out, lse = np.zeros((tokens, heads, v.shape[-1])), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        at = keys - tokens + t
        seen = [
            j
            for j in range(first, keys)
            if (not causal or j <= at)
            and (left < 0 or j >= at - left)
            and (right < 0 or j <= at + right)
            and (mask is None or mask[t, j])
        ]
        for h in range(heads):
            own = h * k.shape[1] // heads
            x = k[seen, own].astype(float) @ q[t, h].astype(float) * (scale or size**-0.5)
            if cap:
                x = cap * np.tanh(x / cap)
            if slopes is not None:
                x = x + slopes[h] * (np.array(seen) - at)
            if len(seen) == 0:
                continue
            weights = np.exp(x)
            total = weights.sum() + (np.exp(sinks[h]) if sinks is not None else 0)
            out[t, h] = weights @ v[seen, own].astype(float) / total
            lse[t, h] = np.log(total)
    return out, lse


def batch(q, k, v, starts, key_starts, **options):
    """The same of requests one after another; a mask is a list of theirs."""
    masks = options.pop("masks", None)
    results = [
        attention(
            q[starts[i] : starts[i + 1]], k[key_starts[i] : key_starts[i + 1]],
            v[key_starts[i] : key_starts[i + 1]],
            mask=masks[i] if masks else None, **options,
        )
        for i in range(len(starts) - 1)
    ]  # fmt: skip
    return tuple(np.concatenate(parts) for parts in zip(*results, strict=True))


def close(found, wanted, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=tolerance)
