"""How rounds become a table, which needs no vLLM."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from bench import table  # noqa: E402
from speed import ratios, turns  # noqa: E402


def test_a_ratio_is_of_the_same_round():
    # The second round was slow for both.
    assert ratios([1.0, 30.0, 3.0], [2.0, 10.0, 3.0]) == "1.00 (0.50 to 3.00)"


def test_rounds_of_one_engine_alone_are_refused():
    with pytest.raises(ValueError):
        ratios([1.0, 2.0], [1.0])


def test_rows_have_what_vllm_tells_and_how_many_times_as_fast_it_was():
    def throughput(seconds: float) -> dict:
        return {"elapsed_time": seconds, "tokens_per_second": 1000 / seconds}

    told = {
        "throughput": {
            "none": [throughput(10.0), throughput(8.0), throughput(10.0)],
            "clattn": [throughput(5.0), throughput(4.0), throughput(20.0)],
        },
        # A batch that something disturbed does not count.
        "latency": {"none": [{"latencies": [1.0, 9.0, 1.5]}], "clattn": [{"latencies": [2.0]}]},
    }
    assert table(told).splitlines()[2:] == [
        "| throughput | 100 tokens/s | 200 tokens/s | 2.00 (0.50 to 2.00) |",
        "| latency | 1.5 s | 2 s | 0.75 (0.75 to 0.75) |",
    ]


def test_engines_take_turns_in_being_first():
    assert list(turns(2)) == [(0, "none"), (0, "clattn"), (1, "clattn"), (1, "none")]
