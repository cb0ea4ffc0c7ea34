"""The batches of a drafter, against double precision: a pass with rejected rows, then its steps."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clattn import reference
from test_directions import HEADS, KV_HEADS, PAGE, SIZE, builder_of, layer_of

from clattn_vllm.backend import CLAttnImpl

#: Tokens in the cache before the pass. Each request has ROWS in it, the last ones rejected.
LENGTHS = [14, 3, 29]
ROWS, REJECTED = 4, [2, 0, 3]
PAGES = torch.tensor([[3, 0, 7], [1, 5, 0], [2, 6, 4]], dtype=torch.int32)


def slots_of(positions):
    """[requests, tokens]: where the keys at these positions are stored."""
    page = torch.gather(PAGES.long(), 1, positions // PAGE)
    return page * PAGE + positions % PAGE


class Drafter:
    """A layer of a drafter with a cache, and all keys and values that it was given."""

    def __init__(self, window):
        self.random = np.random.default_rng(5)
        self.layer = layer_of(window)
        self.builder = builder_of(self.layer)
        self.impl = CLAttnImpl.__new__(CLAttnImpl)
        self.impl.served = self.layer.impl.served
        self.options = reference.Options(scale=SIZE**-0.5, sliding_window=max(window, 0))
        self.cache = torch.full((8, KV_HEADS, PAGE, 2 * SIZE), float("nan"))
        self.keys = self.draw(max(LENGTHS) + ROWS + 3, len(LENGTHS), KV_HEADS)
        self.values = self.draw(*self.keys.shape[:-1])
        pages = self.cache.view(-1, KV_HEADS, 2, PAGE, SIZE)  # a head's keys in front of its values
        for request, length in enumerate(LENGTHS):
            for position in range(length):
                page = pages[PAGES[request, position // PAGE], :, :, position % PAGE]
                page[:, 0] = self.keys[position, request]
                page[:, 1] = self.values[position, request]

    def draw(self, *shape):
        values = self.random.standard_normal((*shape, SIZE)).astype(np.float32)
        return torch.from_numpy(values)

    def run(self, common, positions, draft_index):
        """A pass over the tokens at these positions [requests, rows]; gives [requests, rows]."""
        query = self.draw(positions.numel(), HEADS)
        key, value = (
            all_of[positions, torch.arange(len(LENGTHS))[:, None]].flatten(0, 1)
            for all_of in (self.keys, self.values)
        )
        output = torch.full_like(query, float("nan"))
        metadata = self.builder.build_for_drafting(common, draft_index)
        self.impl.forward(self.layer, query, key, value, self.cache, metadata, output)
        shape = (*positions.shape, HEADS, SIZE)
        return query.view(shape), output.view(shape)

    def check(self, query, output, request, rows, length):
        """The request's first rows, the last of which sees `length` tokens."""
        wanted, _ = reference.attention(
            query[request, :rows].double().numpy(),
            self.keys[:length, request].double().numpy(),
            self.values[:length, request].double().numpy(),
            self.options,
        )
        np.testing.assert_allclose(output[request, :rows].numpy(), wanted, atol=2e-5)


def batch_of(positions, slots):
    """What vLLM's drafters pass; lengths count rejected rows, which have no slots."""
    requests, rows = positions.shape
    return SimpleNamespace(
        num_actual_tokens=requests * rows, num_reqs=requests, causal=True,
        query_start_loc=torch.arange(0, requests * rows + 1, rows, dtype=torch.int32),
        seq_lens=(positions[:, -1] + 1).int(), block_table_tensor=PAGES,
        slot_mapping=slots.flatten(),
    )  # fmt: skip


@pytest.mark.parametrize("window", [-1, 6])
def test_a_pass_with_rejected_rows_and_the_steps_behind_it(window):
    drafter = Drafter(window)
    positions = torch.tensor(LENGTHS)[:, None] + torch.arange(ROWS)
    accepted = ROWS - torch.tensor(REJECTED)
    slots = torch.where(torch.arange(ROWS) < accepted[:, None], slots_of(positions), -1)
    common = batch_of(positions, slots)
    results = drafter.run(common, positions, 0)
    for request, length in enumerate(LENGTHS):
        drafter.check(*results, request, int(accepted[request]), length + int(accepted[request]))

    # Chain steps of one token each: vLLM changes the lengths in place.
    common.query_start_loc = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    common.num_actual_tokens = len(LENGTHS)
    common.seq_lens -= torch.tensor(REJECTED, dtype=torch.int32)
    for step in range(1, 3):
        positions = common.seq_lens[:, None].long()
        common.seq_lens += 1
        common.slot_mapping = slots_of(positions).flatten()
        results = drafter.run(common, positions, step)
        for request, length in enumerate(common.seq_lens.tolist()):
            drafter.check(*results, request, 1, length)


def test_a_drafter_stores_its_context_without_queries():
    drafter = Drafter(-1)
    wanted = drafter.cache.clone()
    drafter.cache[:] = torch.nan
    for request, length in enumerate(LENGTHS):
        positions = torch.arange(length)
        slots = slots_of(positions.expand(len(LENGTHS), -1))[request]
        # The values are a slice of longer rows.
        key, value = drafter.keys[:length, request].contiguous(), drafter.values[:length, request]
        drafter.impl.do_kv_cache_update(drafter.layer, key, value, drafter.cache, slots)
    torch.testing.assert_close(drafter.cache, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_rows_of_a_block_look_both_ways():
    drafter = Drafter(-1)
    positions = torch.tensor(LENGTHS)[:, None] + torch.arange(ROWS)
    common = batch_of(positions, slots_of(positions))
    common.causal = False
    assert drafter.builder.build_for_drafting(common, 0).causal is False
    drafter.options.causal = False
    results = drafter.run(common, positions, 0)
    for request, length in enumerate(LENGTHS):
        drafter.check(*results, request, ROWS, length + ROWS)
