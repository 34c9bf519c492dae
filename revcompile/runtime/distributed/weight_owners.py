"""Which stage uses a parameter or buffer, and which one has its current value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from revcompile.errors import InputError
from revcompile.ir.module_tree import TreeReads
from revcompile.ir.ops import store_buffer
from revcompile.ir.program import StageProgram
from revcompile.runtime.distributed.placement import Layout

__all__ = ["check_buffers", "homes", "named_tensors", "used"]


def named_tensors(model: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers, under their first names or under all they have."""
    parameters = model.named_parameters(remove_duplicate=not every_name)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=not every_name))}


def used(model: nn.Module, program: StageProgram) -> tuple[str, ...]:
    """The parameters and buffers a stage uses, by their first names."""
    return (*program.parameters, *_buffers(model, program))


def homes(model: nn.Module, programs: Sequence[StageProgram]) -> dict[str, int]:
    """From every name of a parameter or buffer in use to the stage that has its current value."""
    first: dict[str, int] = {}
    for program in programs:
        for name in used(model, program):
            first.setdefault(name, program.index)  # tied parameters: the first stage owns them
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    every = ((name, names[id(tensor)]) for name, tensor in named_tensors(model, True).items())
    return {name: first[one] for name, one in every if one in first}


def check_buffers(model: nn.Module, programs: Sequence[StageProgram], layout: Layout) -> None:
    """Refuse buffers that stages of different ranks would change apart from each other."""
    seen: dict[str, int] = {}
    buffers = dict(model.named_buffers())
    for program in programs:
        changing = _changing(model, program)
        for name in _buffers(model, program):
            first = seen.setdefault(name, program.index)
            if (
                id(buffers[name]) in changing
                and layout.places[first] != layout.places[program.index]
            ):
                raise InputError(
                    f"trainer: {name} belongs to a layer that stages {first} and {program.index} "
                    f"share, on ranks {layout.places[first]} and {layout.places[program.index]}; "
                    "place them on one rank with places="
                )


def _changing(model: nn.Module, program: StageProgram) -> set[int]:
    """Ids of the buffers that a stage may change: statistics, leaf modules' own, stored ones."""
    reads = TreeReads(program.forward, model)
    leaves = set(reads.modules)
    changing = [
        module._buffers[name]
        for module, name in reads.buffers
        if module in leaves or isinstance(module, _NormBase)
    ]
    for node in program.forward.find_nodes(op="call_function", target=store_buffer):
        changing += [reads.targets.get(str(source.target)) for source in node.all_input_nodes[:1]]
    return {id(buffer) for buffer in changing}


def _buffers(model: nn.Module, program: StageProgram) -> Iterator[str]:
    """Buffers of the layers a stage calls, and those its code reads itself."""
    read = {id(tensor) for _, tensor in TreeReads(program.forward, model).tensors()}
    for name, buffer in model.named_buffers():
        if id(buffer) in read:
            yield name
