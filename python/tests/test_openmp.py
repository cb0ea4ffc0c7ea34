"""What PyTorch's threads do while they are told to sleep."""

import contextlib
import time

import clattn
import pytest


@pytest.mark.parametrize("torch", [None, object()])
def test_without_pytorch_nothing_happens(monkeypatch, torch):
    monkeypatch.setitem(clattn.openmp.sys.modules, "torch", torch)
    with clattn.openmp_asleep():
        pass


@pytest.fixture
def torch():
    module = pytest.importorskip("torch", reason="pip install torch (the CPU build) to run this")
    if module.get_num_threads() < 2:
        pytest.skip("PyTorch has one thread here")
    return module


def test_an_exception_wakes_them(torch):
    with pytest.raises(ZeroDivisionError), clattn.openmp_asleep(), clattn.openmp_asleep():
        raise ZeroDivisionError
    assert not clattn.openmp._usable()[1].omp_in_parallel()
    ones = torch.ones(300, 300)
    assert (ones @ ones == 300).all()


def test_they_take_no_processor_time(torch):
    ones = torch.ones(700, 700)

    def busy(block):
        times = []
        for _ in range(10):
            assert (ones @ ones == 700).all()
            with block():
                begin = time.process_time()
                time.sleep(0.02)
                times.append(time.process_time() - begin)
        return times

    # Where other programs take the cores, threads that wait in a loop are seldom seen to run.
    awake = max(busy(contextlib.nullcontext))
    assert min(busy(clattn.openmp_asleep)) < min(0.002, awake)
