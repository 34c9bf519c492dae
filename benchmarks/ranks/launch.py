"""Ranks on this machine: processes joined over gloo or NCCL, one thread each; their results."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any, Final

import torch
from torch import distributed, multiprocessing

__all__ = ["RANKS", "on_ranks", "side_by_side"]

RANKS: Final = 2


def on_ranks(
    work: Callable[..., Any], *arguments: Any, ranks: int = RANKS, device: str = "cpu"
) -> list[Any]:
    """Call `work(rank, *arguments)` on every rank, in processes of their own; their results."""
    # Memory goes back to the allocator, not to the system: else page faults come and go by chance.
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        results = manager.dict()
        shared = (ranks, f"{folder}/store", results, work, arguments, device)
        processes = [context.Process(target=_rank, args=(rank, *shared)) for rank in range(ranks)]
        for process in processes:
            process.start()
        _join(processes)
        by_rank = dict(results)
    if len(by_rank) < ranks:
        codes = ", ".join(f"rank {rank}: {p.exitcode}" for rank, p in enumerate(processes))
        raise RuntimeError(f"{work.__module__}: a rank gave no result (exit codes: {codes})")
    return [by_rank[rank] for rank in range(ranks)]


@contextmanager
def side_by_side() -> Iterator[None]:
    """NVIDIA's multi-process service: processes that start meanwhile share a GPU at any moment.

    Without it the kernels of one process run at a time, and those of others wait for their turn.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise RuntimeError("there is no nvidia-cuda-mps-control, which comes with NVIDIA's driver")
    with tempfile.TemporaryDirectory() as folder:
        places = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        os.environ |= places
        try:
            subprocess.run([control, "-d"], check=True)
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, timeout=30, check=False)
            for name in places:
                del os.environ[name]


def _join(processes: Sequence[Any]) -> None:
    """Wait for all; once one has failed the others wait for it in vain, and are ended."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                for other in running.values():
                    other.terminate()


def _rank(
    rank: int,
    ranks: int,
    store: str,
    results: Any,
    work: Callable[..., Any],
    arguments: Any,
    device: str,
) -> None:
    """One rank's life. It ends without clean-up: threads of links may still wait for the other."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    if device == "cuda":
        # NCCL wants a GPU for each rank, unless the ranks claim to be on different machines.
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
        # As many hardware queues as there are. Ranks that run side by side have to share them.
        shared = ranks if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else 1
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": f"{max(1, 32 // shared)}"}
        os.environ |= {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, f"file://{store}", rank=rank, world_size=ranks)
    results[rank] = work(rank, *arguments)
    distributed.barrier()
    os._exit(0)
