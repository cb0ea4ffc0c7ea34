"""The cores of a worker's threads; each test is a process, because a driver starts its once."""

import os
import subprocess
import sys

import pytest

from clattn_vllm.device import bound_cores

TELL = """
import os
from clattn_vllm.device import device

before = os.sched_getaffinity(0)
units = device().context.capabilities.compute_units
assert os.sched_getaffinity(0) == before
allowed = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
print(units, max(map(len, allowed)))
"""


@pytest.mark.parametrize(
    ("environment", "cores"),
    [
        ({}, set()),
        ({"GOMP_CPU_AFFINITY": "0 1 5"}, {0, 1, 5}),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[3,4]"}, {3, 4}),
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, set()),
        ({"OMP_PLACES": "{7}"}, {7}),
        ({"OMP_PLACES": "{2,4}"}, {2, 4}),
        ({"OMP_PLACES": "7"}, set()),
        ({"OMP_PLACES": "{0:4}"}, set()),
        ({"OMP_PLACES": "cores"}, set()),
    ],
)
def test_cores_are_those_that_vllm_writes(environment, cores):
    assert bound_cores(environment) == cores


def told(environment: dict[str, str]) -> list[int]:
    """Compute units, and cores that the freest thread may use."""
    command = [sys.executable, "-c", TELL]
    # The first thread is bound to one core, as OpenMP does.
    result = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]),
    )  # fmt: skip
    return [int(number) for number in result.stdout.split()]


def test_threads_get_all_cores_of_a_worker():
    cores = sorted(os.sched_getaffinity(0))
    listed = " ".join(map(str, cores))
    assert told({"GOMP_CPU_AFFINITY": listed}) == [len(cores), len(cores)]


def test_a_worker_of_one_core_has_one_thread():
    core = max(os.sched_getaffinity(0))
    assert told({"GOMP_CPU_AFFINITY": str(core)}) == [1, 1]
