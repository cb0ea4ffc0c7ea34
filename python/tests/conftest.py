import clattn
import numpy as np
import pytest


@pytest.fixture(scope="session")
def context():
    return clattn.Context()


@pytest.fixture(scope="session")
def queue(context):
    return context.create_queue()


@pytest.fixture
def random():
    return np.random.default_rng(11)
