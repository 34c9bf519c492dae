"""tree: plain values come back as they were, and a file cannot make the reader run anything."""

import ast
import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from helpers import refuses

from revcompile.errors import InputError
from revcompile.runtime.checkpoint import tree
from revcompile.runtime.checkpoint.tree import (
    TensorFile,
    decode,
    encode,
    well_formed,
    write_tensors,
)

VALUES: list[Any] = [
    *(None, True, -3, "text", 0.5, float("inf"), [1, [2.5, None]], (1, (2, "a"))),
    *({"a": 1, (1, 2): [3]}, {1, 2, 3}, frozenset(("x", "y")), slice(1, None, 2), ..., 1 + 2j),
    *(torch.float16, torch.channels_last, torch.strided, torch.Size((2, 3)), torch.device("cpu")),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    read = decode(json.loads(json.dumps(encode(value))))
    assert type(read) is type(value) and read == value


@pytest.mark.parametrize("value", [print, torch.nn.Linear, torch.nn.ReLU(), object(), Path("x")])
def test_code_and_objects_cannot_be_written(value: Any) -> None:
    refuses(InputError, "a value of type", encode, [value])


FOREIGN: list[dict[str, Any]] = [
    *({"function": "os:system"}, {"layer": "torch.nn:Linear"}, {"enum": ["x:Y", "Z"]}),
    *({"dtype": "load"}, {"dtype": "os"}, {"layout": "float32"}, {"device": "no such device"}),
    *({"dtype": 3}, {"complex": [1, 2, 3]}, {"size": ["a"]}, {"dict": [1]}, {"tuple": 3}),
    *({"dict": [[{"dict": []}, 1]]}, {"float": "many"}, {"a": 1, "b": 2}, {}),
]


@pytest.mark.parametrize("data", FOREIGN, ids=repr)
def test_what_nobody_wrote_is_refused(data: Any) -> None:
    with pytest.raises(InputError), well_formed("a tree"):
        decode(data)


PICKLED: Final = {
    *("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""What unpickles."""


def test_nothing_that_reads_files_knows_pickle_eval_or_exec() -> None:
    runtime = Path(tree.__file__).parents[1]
    folders = "checkpoint", "distributed", "trainer"
    files = [file for folder in folders for file in (runtime / folder).glob("*.py")]
    assert len(files) > 10
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        for node in nodes:
            names |= {node.attr} & PICKLED if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {name.name for name in node.names}
        assert not names & ({"eval", "exec", "compile", "__import__", "importlib"} | PICKLED), file


@pytest.mark.parametrize("before", [1, 2])
def test_complex_numbers_wherever_they_are_in_a_file(before: int, tmp_path: Path) -> None:
    """One of both begins where an x86_64 processor cannot load them from."""
    numbers = torch.complex(torch.arange(9.0).double(), torch.arange(9.0).double() + 1)
    file = tmp_path / "tensors.safetensors"
    write_tensors(file, {"a": torch.zeros(before, dtype=torch.float64), "b": numbers})
    found = TensorFile(file).read("b")
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found.clone(), numbers)
