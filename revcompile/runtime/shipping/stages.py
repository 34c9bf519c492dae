"""One stage, out to a folder and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, fx, nn

from revcompile.errors import InputError
from revcompile.ops import attribute
from revcompile.program import StageProgram
from revcompile.runtime.shipping.graphs import read_graph, write_graph
from revcompile.runtime.shipping.modules import read_modules, write_modules
from revcompile.runtime.shipping.names import ALLOWED, Names, located
from revcompile.runtime.shipping.tensors import TensorReader, TensorWriter, as_stored
from revcompile.runtime.shipping.values import decode, encode, written

__all__ = ["load_stage", "save_stage"]

_FORMAT: Final = "revcompile stage"
_VERSION: Final = 1
_PROGRAM: Final = "program.json"
_TENSORS: Final = "tensors.safetensors"
_GRAPHS: Final = ("forward", "backward", "inverse")


def save_stage(program: StageProgram, root: nn.Module, folder: str | Path) -> None:
    """Write a stage: its program, and the modules and tensors of `root` that its code uses.

    The folder gets `program.json`, which a person can read, and `tensors.safetensors`. What
    shares memory is stored once.
    """
    tensors = TensorWriter()
    with located(f"save_stage: stage {program.index}"):
        fields = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
        graphs = {name: fields.pop(name) for name in _GRAPHS}
        found: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
        found["program"] = {name: encode(value) for name, value in fields.items()}
        found["graphs"] = {name: _write(name, graph) for name, graph in graphs.items()}
        found["modules"] = write_modules(root, _paths(program), tensors)
        found["tensors"], memory = tensors.finish()
        _store(Path(folder), written(found) + "\n", memory)


def _write(name: str, graph: fx.Graph | None) -> list[dict[str, Any]] | None:
    with located(name):
        return None if graph is None else write_graph(graph)


def _paths(program: StageProgram) -> list[str]:
    """Everything of the root module that the stage's code reads."""
    paths = dict.fromkeys(program.parameters)
    for graph in (program.forward, program.backward, program.inverse):
        for node in graph.nodes if graph is not None else ():
            if node.op in ("call_module", "get_attr"):
                paths[node.target] = None
    return list(paths)


def _store(folder: Path, text: str, memory: dict[str, Tensor]) -> None:
    """Write both files beside the old ones, then put them in place: never half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    new = {name: folder / f"{name}.new" for name in (_PROGRAM, _TENSORS)}
    whole = {name: as_stored(tensor.cpu()).clone().contiguous() for name, tensor in memory.items()}
    try:
        safetensors.torch.save_file(whole, new[_TENSORS])
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"tensors cannot be written by safetensors ({error})") from error
    new[_PROGRAM].write_text(text, encoding="utf-8")
    for name, file in new.items():
        os.replace(file, folder / name)


def load_stage(
    folder: str | Path, *, allow: Iterable[str] = ALLOWED
) -> tuple[StageProgram, nn.Module]:
    """Read a stage and the module its code runs on: `compile_graph(program.forward)(root, ...)`.

    Nothing is unpickled. Functions and classes are imported by name, from the packages in
    `allow` only; for layers of your own write `allow=(*ALLOWED, "my_package")`.
    """
    folder = Path(folder)
    names = Names(allow)
    with located(f"load_stage: {folder}"):
        found = _read_json(folder / _PROGRAM)
        memory = _read_tensors(folder / _TENSORS)
        try:
            root = read_modules(found["modules"], names, TensorReader(found["tensors"], memory))
            program = _read_program(found, names)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{_PROGRAM} is not as save_stage writes it ({type(error).__name__}: {error}); "
                "save the stage again"
            ) from error
        _check_paths(program, root)
    return program, root


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file.name} cannot be read ({error}); save the stage again") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise InputError(f"{file.name} is no stage written by save_stage")
    if found.get("version") != _VERSION:
        raise InputError(
            f"{file.name} has version {found.get('version')}, but this revcompile reads "
            f"{_VERSION}; save the stage with the revcompile that reads it"
        )
    return found


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file.name} cannot be read ({error}); save the stage again") from error


def _read_program(found: dict[str, Any], names: Names) -> StageProgram:
    fields = {name: decode(value, names) for name, value in found["program"].items()}
    for name in _GRAPHS:
        data = found["graphs"][name]
        with located(name):
            fields[name] = None if data is None else read_graph(data, names)
    program = StageProgram(**fields)
    # A class built from a file has whatever the file said; the graphs were checked one by one.
    for field in dataclasses.fields(program):
        value = getattr(program, field.name)
        if str(field.type).startswith("tuple") and not isinstance(value, tuple):
            raise InputError(f"{field.name}: expected a tuple, got {value!r}")
    return program


def _check_paths(program: StageProgram, root: nn.Module) -> None:
    for path in _paths(program):
        try:
            attribute(root, path)
        except AttributeError as error:
            raise InputError(f"the graphs read {path!r}, which no module has") from error
