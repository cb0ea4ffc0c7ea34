"""What PyTorch's threads do while they are told to sleep."""

import time

import clattn
import pytest


def test_without_pytorch_nothing_happens(monkeypatch):
    monkeypatch.delitem(clattn.openmp.sys.modules, "torch", raising=False)
    with clattn.openmp_asleep():
        pass


def test_an_exception_wakes_them():
    torch = pytest.importorskip("torch", reason="pip install torch (the CPU build) to run this")
    with pytest.raises(ZeroDivisionError), clattn.openmp_asleep(), clattn.openmp_asleep():
        raise ZeroDivisionError
    ones = torch.ones(300, 300)
    assert (ones @ ones == 300).all()


def test_they_take_no_processor_time():
    torch = pytest.importorskip("torch", reason="pip install torch (the CPU build) to run this")
    ones = torch.ones(700, 700)
    times = []
    for _ in range(10):
        assert (ones @ ones == 700).all()
        with clattn.openmp_asleep():
            begin = time.process_time()
            time.sleep(0.02)
            times.append(time.process_time() - begin)
    assert min(times) < 0.002
