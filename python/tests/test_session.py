"""Sessions: requests that share blocks, in steps of any mixture, against plain attention."""

import clattn
import numpy as np
import pytest
from clattn import reference

OPTIONS = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "f32"}


def rows(kind, token_ids, positions, layer, heads):
    """What a model would project: the same for the same token at the same position."""
    values = [
        np.random.default_rng([kind, layer, token, position]).standard_normal((heads, 32))
        for token, position in zip(token_ids, positions, strict=True)
    ]
    return np.array(values, np.float32)


def attend(session, step):
    """All layers of a step; gives the outputs."""
    outputs = []
    for layer in range(session.num_layers):
        query, key, value = (
            rows(kind, step.token_ids, step.positions, layer, heads)
            for kind, heads in enumerate((4, 2, 2))
        )
        outputs.append(np.empty_like(query))
        session.attend(layer, query, key, value, outputs[-1])
    return outputs


def check(session, ids, step, outputs):
    """Every row of a step against attention over all of its request's tokens."""
    for i, request in enumerate(ids):
        first, last = step.query_start_loc[i : i + 2]
        tokens = session.tokens(request)[: step.seq_lens[i]]
        positions = range(len(tokens))
        for layer, output in enumerate(outputs):
            query, key, value = (
                rows(kind, tokens, positions, layer, heads).astype(float)
                for kind, heads in enumerate((4, 2, 2))
            )
            options = reference.Options(scale=32**-0.5)
            want, _ = reference.attention(query[first - last :], key, value, options)
            np.testing.assert_allclose(output[first:last], want, atol=2e-5)


@pytest.fixture
def session(context):
    layers = [clattn.AttentionOptions(**OPTIONS) for _ in range(2)]
    return clattn.Session(context, layers, num_blocks=12)


def test_layers_with_a_window_give_up_blocks(context):
    layers = [clattn.AttentionOptions(**OPTIONS, sliding_window=window) for window in (0, 8)]
    limits = clattn.BuilderOptions(max_num_reqs=1, max_num_batched_tokens=32)
    session = clattn.Session(context, layers, num_blocks=64, builder=limits)
    ((window, blocks),) = session.window_blocks()
    assert (window, blocks.num_blocks) == (8, 2 + 1 + 3)
    request = session.add(range(100))
    while session.num_computed_tokens(request) < 100:
        attend(session, session.step([clattn.StepRequest(id=request, max_tokens=32)]))
    assert (session.blocks.num_used, blocks.num_used) == (7, 2)


def run(session, *requests):
    step = session.step([clattn.StepRequest(**request) for request in requests])
    outputs = attend(session, step)
    check(session, [request["id"] for request in requests], step, outputs)
    return step


def test_prompts_chunks_decodes_and_shared_beginnings(session):
    first = session.add(list(range(40)))
    assert run(session, {"id": first, "max_tokens": 25}).num_tokens == 25
    assert session.num_computed_tokens(first) == 25
    second = session.add([7, 7, 7])
    mixed = run(session, {"id": first}, {"id": second})
    assert mixed.last_row(0) == 14 and list(mixed.seq_lens) == [40, 3]
    third = session.add(list(range(40)) + [9])
    assert session.num_computed_tokens(third) == 32  # two full blocks, found in the cache
    assert session.block_table(third)[:2] == session.block_table(first)[:2]
    step = run(
        session, {"id": first, "new_tokens": [5]}, {"id": second, "new_tokens": [6]}, {"id": third}
    )
    assert list(step.positions) == [40, 3, *range(32, 41)]
    fork = session.fork(first)
    run(session, {"id": fork, "new_tokens": [1]}, {"id": first, "new_tokens": [2]})
    free = session.num_free_blocks
    session.finish(second)
    assert session.num_free_blocks == free + 1


def test_too_few_blocks(session):
    held = session.add(list(range(150)))
    run(session, {"id": held})
    other = session.add([1] * 60)
    with pytest.raises(clattn.OutOfBlocks, match="2"):
        session.step([clattn.StepRequest(id=other)])
    session.evict(held)
    run(session, {"id": other})


def test_steps_outlive_the_next_one(session):
    step = session.step([clattn.StepRequest(id=session.add([3, 1]))])
    tokens = step.token_ids
    attend(session, step)
    run(session, {"id": session.add([4, 4, 4])})
    del step
    assert list(tokens) == [3, 1]


def test_making_layers_tells_its_progress(context):
    told = []
    layers = [clattn.AttentionOptions(**OPTIONS) for _ in range(2)]
    clattn.Session(context, layers, num_blocks=1, progress=lambda *step: told.append(step))
    assert told == [(0, 2), (1, 2), (2, 2)]
    with pytest.raises(ZeroDivisionError):
        clattn.Session(context, layers, num_blocks=1, progress=lambda done, total: 1 / 0)


def test_warm_up_tells_its_progress(session):
    told = []
    session.warm_up(lambda *progress: told.append(progress))
    assert told[-1] == (2, 2)
    with pytest.raises(ZeroDivisionError):
        session.warm_up(lambda done, total: 1 / 0)
    assert any(candidate.chosen for candidate in session.explain())


def test_salts_keep_requests_apart(session):
    prompt = list(range(40))
    run(session, {"id": session.add(prompt, cache_salt=1)})
    assert session.num_computed_tokens(session.add(prompt)) == 0
    assert session.num_computed_tokens(session.add(np.array(prompt), 2)) == 0
    assert session.num_computed_tokens(session.add(prompt, 1)) == 32
    assert session.blocks.num_used == session.num_blocks - session.num_free_blocks
    with pytest.raises(clattn.InvalidArgument, match="prompt: float64"):
        session.add([0.5])


def test_scales_of_a_session(context):
    layers = [clattn.AttentionOptions(**OPTIONS, kv_cache_dtype="int8")]
    session = clattn.Session(context, layers, num_blocks=4)
    prompt = session.add([1, 2, 3])
    step = session.step([clattn.StepRequest(id=prompt)])
    with pytest.raises(clattn.InvalidArgument, match="load_kv_scales"):
        attend(session, step)
    assert session.load_kv_scales(0, k_scale=0.03, v_scale=0.03) == []
    (output,) = attend(session, session.step([clattn.StepRequest(id=prompt)]))
    value = rows(2, [1], [0], 0, 2)[0].astype(float)
    np.testing.assert_allclose(output[0], np.repeat(value, 2, axis=0), atol=0.02)
    layer = session.layer(0)
    scales = np.empty(3, np.float32)
    session.queue.read(layer.scales, scales)
    assert scales[:2] == pytest.approx([0.03, 0.03]) and layer.kv_cache.dtype == "int8"


def test_images_see_themselves(context):
    layers = [clattn.AttentionOptions(**OPTIONS, use_spans=True)]
    session = clattn.Session(context, layers, num_blocks=4)
    prompt = list(range(20))
    part = clattn.StepRequest(id=session.add(prompt), spans=[(0, 4), (7, 18)])
    assert list(part.spans[1]) == [7, 18]
    (output,) = attend(session, session.step([part]))
    query, key, value = (
        rows(kind, prompt, range(20), 0, heads).astype(float)
        for kind, heads in enumerate((4, 2, 2))
    )
    want, _ = reference.attention(
        query, key, value, reference.Options(scale=32**-0.5), reference.Request(spans=part.spans)
    )
    np.testing.assert_allclose(output, want, atol=2e-5)


def test_spans_that_no_layer_takes_are_refused(session):
    part = clattn.StepRequest(id=session.add([1, 2, 3]), spans=[(0, 2)])
    with pytest.raises(clattn.InvalidArgument, match="no layer has use_spans: none"):
        session.step([part])


def test_drafts_and_what_is_rolled_back(context):
    layers = [clattn.AttentionOptions(**OPTIONS, use_trees=True) for _ in range(2)]
    session = clattn.Session(context, layers, num_blocks=12)
    request = session.add(list(range(20)))
    run(session, {"id": request})
    step = session.step(
        [
            clattn.StepRequest(
                id=request, new_tokens=[7], drafts=[11, 12, 13], draft_parents=[-1, -1, 1]
            )
        ]
    )
    assert list(step.num_drafts) == [3] and step.last_row(0) == 0
    assert list(step.positions) == [20, 21, 21, 22] and list(step.seq_lens) == [24]
    outputs = attend(session, step)
    # The last draft follows the second one.
    path, options = [*range(20), 7, 12, 13], reference.Options(scale=32**-0.5)
    for layer, output in enumerate(outputs):
        query, key, value = (
            rows(kind, path, range(23), layer, heads).astype(float)
            for kind, heads in enumerate((4, 2, 2))
        )
        want, _ = reference.attention(query[-1:], key, value, options)
        np.testing.assert_allclose(output[-1:], want, atol=2e-5)
    for refused in (lambda: session.fork(request), lambda: session.truncate(request, 1)):
        with pytest.raises(clattn.InvalidArgument, match="request 0 has 3 drafts, legal: none"):
            refused()
    with pytest.raises(clattn.InvalidArgument, match=r"path\[1\] is 0, legal: one of its 3 drafts"):
        session.accept(request, [1, 0])
    session.accept(request, np.array([1, 2]))
    assert session.tokens(request) == path
    run(session, {"id": request, "new_tokens": [5]})
    session.truncate(request, 18)
    with pytest.raises(clattn.InvalidArgument, match="length is 19, legal: 1 … 18"):
        session.truncate(request, 19)
    run(session, {"id": request, "new_tokens": [3, 1]})
    next_step = [clattn.StepRequest(id=request, new_tokens=[4], drafts=[5, 6])]
    free = session.num_free_blocks
    needed = session.blocks_needed(next_step)
    step = session.step(next_step)
    assert needed == [free - session.num_free_blocks]
    assert list(step.positions) == [20, 21, 22]
    attend(session, step)
    with pytest.raises(clattn.InvalidArgument, match="request 9 does not exist"):
        session.accept({request: [0], 9: []})
    session.accept({request: []})
    assert session.tokens(request) == [*range(18), 3, 1, 4]
