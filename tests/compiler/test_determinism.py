"""The same model compiles to the same names, cuts and programs in every process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import revcompile
from tests.compiler.test_families import MODELS

SMALL = ("Constants", "Streams")


class Constants(nn.Module):
    """Tensors the model makes from nothing become buffers; branches read several sides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.tables = [torch.full((8,), 0.1 * i) for i in range(9)]

    def forward(self, x: Tensor) -> Tensor:
        sides = [self.layers[0](x) + table for table in self.tables]
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x) + sum(sides[1:], sides[0]))
        return x


class Streams(nn.Module):
    """Two streams that read each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y = x.cos()
        for left, right in zip(self.left, self.right, strict=True):
            x = x + torch.tanh(left(x) * y.sigmoid())
            y = y + torch.tanh(right(y) * x.sigmoid())
        return {"x": x, "y": y}


def compiled(name: str, stages: int) -> revcompile.StagedModel:
    """A model of this file, or one of timm's."""
    torch.manual_seed(0)
    if name in SMALL:
        model, example = globals()[name](), torch.randn(2, 3, 8)
        return revcompile.petrafy(model, stages, example, check="off")
    import timm

    return revcompile.petrafy(timm.create_model(name), stages, check="off")


def fingerprint(net: revcompile.StagedModel) -> str:
    """Everything that two ranks, or a run and its continuation, must agree on."""
    lines = [f"buffer {name}" for name, _ in net.model.named_buffers()]
    lines += [f"parameter {name}" for name, _ in net.model.named_parameters()]
    lines += [f"{name}: {kind}" for name, kind in net._partition.types.items()]
    lines += [str(refusal) for refusal in net._partition.rewired.refusals]
    lines += [f"tied {tie}: {names}" for tie, names in net._partition.ties.items()]
    for stage in net.stages:
        lines += [f"stage {stage.part.index}: {stage.part.inputs} -> {stage.part.outputs}"]
        lines += [piece.name for piece in stage.part.pieces]
        lines += [stage.code, str(stage.generated.forward), str(stage.generated.backward)]
    return "\n".join(lines)


def assert_equal_everywhere(names: Sequence[str]) -> None:
    """This process, whatever it did before, compiles as a new one with another hash seed."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-m", "tests.compiler.test_determinism", *names],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(other.stdout)
    for name in names:
        assert fingerprint(compiled(name, 3)).splitlines() == found[name].splitlines(), name


def test_processes_of_different_hash_seeds_compile_the_same_programs() -> None:
    assert_equal_everywhere(SMALL)


@pytest.mark.slow
def test_all_families_compile_the_same_in_processes_of_different_hash_seeds() -> None:
    assert_equal_everywhere(MODELS)


if __name__ == "__main__":
    print(json.dumps({name: fingerprint(compiled(name, 3)) for name in sys.argv[1:]}))
