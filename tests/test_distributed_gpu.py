"""Several NCCL ranks on one GPU train what one process trains there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from distributed_worker import Run, launch, trained
from helpers import worst

from revcompile.schedule import METHODS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

# NCCL wants a GPU for each rank, unless the ranks claim to be on different machines.
ENVIRONMENT: Final = {
    "NCCL_HOSTID": "rank{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NVIDIA_TF32_OVERRIDE": "0",
}


def on_gpu(folder: Path, ranks: int, runs: list[Run], limit: float = 60) -> list[Any]:
    plain = [dataclasses.asdict(run) for run in runs]
    results, codes = launch(
        folder,
        ranks,
        "train_all",
        start="spawn",
        limit=limit,
        runs=plain,
        device="cuda",
        env=ENVIRONMENT,
    )
    assert codes == [0] * ranks
    return results


EVERY_METHOD: Final = [
    Run(device="cuda", method=method, accumulate=2, steps=7) for method in METHODS
]
SOME: Final = [
    Run(device="cuda", model="words", method="1f1b", accumulate=2, steps=7),
    Run(device="cuda", method="backprop", clip=0.1, steps=5),
    Run(device="cuda", steps=200),
]


@pytest.mark.parametrize(("ranks", "runs"), [(2, EVERY_METHOD), (4, SOME)])
def test_nccl_ranks_train_as_one_process(tmp_path: Path, ranks: int, runs: list[Run]) -> None:
    """The last run of all is there to come to its end."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    results = on_gpu(tmp_path, ranks, runs)
    for number, run in enumerate(runs):
        expected = trained(run)
        losses = results[-1][number]["losses"]
        early = min(len(losses), 20)  # rounding grows with the steps
        assert losses[:early] == pytest.approx(expected["losses"][:early], rel=1e-3), run
        assert len(losses) == run.steps
        for found in results:
            assert found[number]["state"].keys() == expected["state"].keys()
            if run.steps <= 20:
                error, where = worst(expected["state"], found[number]["state"])
                assert error < 1e-2, (run, where, error)
