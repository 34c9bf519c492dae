"""What every test runs under: few threads, a fixed seed, deterministic kernels on the CPU."""

import gc
from collections.abc import Iterator

import pytest
import torch

from revcompile.compiler.capture.isolation import seed_all
from revcompile.ir import ops

torch.set_num_threads(min(2, torch.get_num_threads()))
gc.set_threshold(100_000, 20, 20)  # little that is imported becomes garbage


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of garbage collection: most of its work, and for nothing.

    Graphs are full of cycles, so that collections are frequent.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 20)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed the generators: 0 unless a test says `parametrize("seed", [...], indirect=True)`."""
    value: int = getattr(request, "param", 0)
    seed_all(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)  # `seed_all` leaves out devices that are not in use yet
    return value


@pytest.fixture(autouse=True)
def torch_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Deterministic algorithms, and no test's global settings leak into the next."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    # On a CPU without bf16 instructions the first bf16 matmul switches oneDNN off for good.
    onednn = torch.backends.mkldnn.enabled
    # On CUDA some backward passes have no deterministic kernel and would raise.
    torch.use_deterministic_algorithms(request.node.get_closest_marker("gpu") is None)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn


@pytest.fixture(autouse=True)
def statistics_move_again() -> Iterator[None]:
    """What a test has frozen others would find frozen."""
    yield
    assert not ops.statistics_frozen.get()
