"""Which rank has the current value of a parameter or buffer, and how all get it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, fx, nn

from revcompile.errors import InputError
from revcompile.ops import attribute
from revcompile.program import StageProgram
from revcompile.runtime.distributed.layout import Layout

__all__ = ["check_buffers", "homes"]


def homes(model: nn.Module, programs: Sequence[StageProgram]) -> dict[str, int]:
    """From every parameter and buffer a stage uses to the stage that has its current value."""
    found: dict[str, int] = {}
    for program in programs:
        for name in (*program.parameters, *_buffers(model, program)):
            found.setdefault(name, program.index)  # tied parameters: the first stage owns them
    return found


def check_buffers(model: nn.Module, programs: Sequence[StageProgram], layout: Layout) -> None:
    """Refuse buffers that stages of different ranks would change apart from each other."""
    seen: dict[str, int] = {}
    for program in programs:
        for name in _buffers(model, program):
            first = seen.setdefault(name, program.index)
            moves = "running" in name or "num_batches" in name
            if moves and layout.places[first] != layout.places[program.index]:
                raise InputError(
                    f"trainer: {name} belongs to a layer that stages {first} and {program.index} "
                    f"share, on ranks {layout.places[first]} and {layout.places[program.index]}; "
                    "place them on one rank with places="
                )


def _buffers(model: nn.Module, program: StageProgram) -> Iterator[str]:
    """Buffers of the layers a stage calls, and those its code reads itself."""
    prefixes: set[str] = set()
    names: set[str] = set()
    for node in program.forward.nodes:
        if node.op == "call_module":
            prefixes.add(f"{node.target}.")
        elif node.op == "get_attr":
            _note(model, node, prefixes, names)
    for name, _ in model.named_buffers():
        if name in names or any(name.startswith(prefix) for prefix in prefixes):
            yield name


def _note(model: nn.Module, node: fx.Node, prefixes: set[str], names: set[str]) -> None:
    target = str(node.target)
    found = attribute(model, target)
    if isinstance(found, nn.Module):
        prefixes.add(f"{target}.")
    elif isinstance(found, Tensor):
        names.add(target)
