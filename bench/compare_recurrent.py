"""Rows of recurrent layers: their tensors, the rule in float64, and the peers that compute it.

Gates are raw: decay = exp(-exp(a_log) softplus(a + dt_bias)), beta = sigmoid(b); queries and keys
are normalised by the kernels. Each call of a peer begins with the same states and gives new ones.
"""
import functools

import torch

from compare_problem import (DTYPES, MAX_SETS, RECURRENT, ROTATE_BYTES, Comparable, Unsupported,
                             distance, larger)

NORM_EPS = 1e-6
CHECKED_ROWS = 8  # of the values of the first and the last head


class RuleProblem(Comparable):
    """The gated delta rule of one row over all of its requests."""

    kind = RECURRENT

    def __init__(self, row, device, quick):
        options = row["options"]
        self.name, self.options, self.device = row["name"], options, device
        self.dtype = DTYPES[options["dtype"]]
        self.k_heads, self.v_heads = options["num_k_heads"], options["num_v_heads"]
        self.k_dim, self.v_dim = options["head_k_dim"], options["head_v_dim"]
        lengths = {query_len for _, query_len, _ in row["requests"]}
        if len(lengths) > 1:
            raise Unsupported("requests of several lengths")
        self.length = lengths.pop()
        self.continues = [seq > query for n, query, seq in row["requests"] for _ in range(n)]
        self.batch, self.scale = len(self.continues), self.k_dim ** -0.5
        torch.manual_seed(7)
        tokens = (self.batch, self.length)
        state = self.batch * self.v_heads * self.v_dim * self.k_dim * 4
        rows = self.batch * self.length * (2 * self.k_heads * self.k_dim +
                                           2 * self.v_heads * self.v_dim)
        set_bytes = state + rows * self.dtype.itemsize
        self.sets = max(1, min(MAX_SETS, -(-ROTATE_BYTES[quick] // set_bytes)))
        self.a_log = torch.rand(self.v_heads, device=device)
        self.dt_bias = torch.rand(self.v_heads, device=device)
        self.inputs = [{
            "q": self.random(*tokens, self.k_heads, self.k_dim),
            "k": self.random(*tokens, self.k_heads, self.k_dim),
            "v": self.random(*tokens, self.v_heads, self.v_dim),
            "a": self.random(*tokens, self.v_heads), "b": self.random(*tokens, self.v_heads),
        } for _ in range(self.sets)]
        first = torch.randn(self.batch, self.v_heads, self.v_dim, self.k_dim, device=device)
        first *= torch.tensor(self.continues, device=device)[:, None, None, None]
        self.first_states = first

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def states(self):
        """A peer's own copies of the first states, one for each set."""
        return [self.first_states.clone() for _ in range(self.sets)]

    def packed(self, tensor):
        """[batch, length, ...] as [tokens, ...]."""
        return tensor.flatten(0, 1)

    def log_decay(self, a):
        return -self.a_log.exp() * torch.nn.functional.softplus(a.float() + self.dt_bias)

    def check(self, output):
        """Largest error over some rows of the first and last request, against the rule token by
        token in float64 on the CPU, and the largest relative error of a token's rows."""
        worst, off = 0.0, 0.0
        got = output.view(self.batch, self.length, self.v_heads, self.v_dim)
        for request in {0, self.batch - 1}:
            for head in {0, self.v_heads - 1}:
                truth = self.truth(request, head)
                mine = got[request, :, head, :CHECKED_ROWS].cpu().double()
                worst = larger(worst, (mine - truth).abs() / (1 + truth.abs()))
                for token in {0, self.length // 2, self.length - 1}:
                    off = max(off, distance(mine[token].tolist(), truth[token].tolist()))
        return worst, off

    def truth(self, request, head):
        key_head = head * self.k_heads // self.v_heads
        one = {name: tensor[request].cpu().double() for name, tensor in self.inputs[0].items()}
        q, k = (one[name][:, key_head] for name in "qk")
        q, k = (x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (q, k))
        v, beta = one["v"][:, head, :CHECKED_ROWS], one["b"][:, head].sigmoid()
        decay = torch.nn.functional.softplus(one["a"][:, head] + self.dt_bias[head].item())
        decay = (-self.a_log[head].cpu().double().exp() * decay).exp()
        state = self.first_states[request, head, :CHECKED_ROWS].cpu().double()
        rows = []
        for t in range(self.length):
            state = decay[t] * state
            state = state + torch.outer(beta[t] * (v[t] - state @ k[t]), k[t])
            rows.append(self.scale * (state @ q[t]))
        return torch.stack(rows)


def prepare_fla(ops, problem, rule):
    """flash-linear-attention's Triton kernels; a batch of requests of one length."""
    if (rule == "chunk") != (problem.length > 1):
        raise Unsupported("prompts alone" if rule == "chunk" else "decode alone")
    function = getattr(ops, f"{rule}_gated_delta_rule")
    common = {"scale": problem.scale, "output_final_state": True, "state_v_first": True,
              "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
              "use_beta_sigmoid_in_kernel": True, "A_log": problem.a_log,
              "dt_bias": problem.dt_bias}
    states = problem.states()

    def call(index):
        inputs = problem.inputs[index]
        out, _ = function(inputs["q"], inputs["k"], inputs["v"], g=inputs["a"], beta=inputs["b"],
                          initial_state=states[index], **common)
        return problem.packed(out)
    return call


def prepare_transformers(qwen3_next, problem, rule):
    """What transformers computes where no library of kernels is installed."""
    if (rule == "chunk") != (problem.length > 1):
        raise Unsupported("prompts alone" if rule == "chunk" else "decode alone")
    function = getattr(qwen3_next, f"torch_{rule}_gated_delta_rule")
    states = [states.transpose(2, 3).contiguous() for states in problem.states()]
    copies = problem.v_heads // problem.k_heads

    def call(index):
        inputs = problem.inputs[index]
        query, key = (inputs[name].repeat_interleave(copies, dim=2) for name in "qk")
        out, _ = function(query, key, inputs["v"], g=problem.log_decay(inputs["a"]),
                          beta=inputs["b"].sigmoid(), initial_state=states[index],
                          output_final_state=True, use_qk_l2norm_in_kernel=True)
        return problem.packed(out)
    return call


#: As compare_peers.PEERS.
PEERS = {
    "cuda": [(f"fla-{rule}", "fla", functools.partial(prepare_fla, rule=rule))
             for rule in ("chunk", "fused_recurrent")],
    "cpu": [(f"transformers-{rule}", "transformers",
             functools.partial(prepare_transformers, rule=rule))
            for rule in ("chunk", "recurrent")],
}
