"""Modules as JSON: the class by its name, the plain attributes, the tensors by their key.

Only what a stage's graphs reach is written. It stands at its own dotted path in a tree of plain
`nn.Module`s; constructors are never called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.utils import parametrize

from revcompile.errors import InputError
from revcompile.runtime.shipping.graphs import check_path
from revcompile.runtime.shipping.names import Names, located, name_of
from revcompile.runtime.shipping.tensors import TensorReader, TensorWriter
from revcompile.runtime.shipping.values import decode, encode

__all__ = ["read_modules", "write_modules"]

_OWN: Final = frozenset(nn.Module().__dict__)
"""What every module has: written apart (tensors, children, mode) or refused (hooks)."""

_PARTS: Final = {
    "training",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
}
_FLAT: Final = {"_flat_weights", "_flat_weight_refs"}
"""Of recurrent layers: weak references to their own parameters, made anew."""


def write_modules(
    root: nn.Module, paths: Iterable[str], tensors: TensorWriter
) -> list[dict[str, Any]]:
    """Records of the modules and attributes at these paths, parents before children."""
    writer = _Writer(root, tensors)
    for path in paths:
        writer.want(path)
    writer.walk(root, "", whole="" in writer.modules)
    return writer.records


class _Writer:
    def __init__(self, root: nn.Module, tensors: TensorWriter) -> None:
        self.root = root
        self.tensors = tensors
        self.modules: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.around: set[str] = {""}
        self.records: list[dict[str, Any]] = []
        self.written: dict[int, str] = {}

    def want(self, path: str) -> None:
        """Note a module, or an attribute of one, with the modules it stands in."""
        check_path(path)
        owner: Any = self.root
        *outer, last = path.split(".")
        for step in outer:
            owner = getattr(owner, step, None)
        if not isinstance(owner, nn.Module) or not hasattr(owner, last):
            raise InputError(
                f"{path}: the graphs read it, but root has no such module or attribute of a "
                "module; pass the root module that the program was made for"
            )
        if isinstance(getattr(owner, last), nn.Module):
            self.modules.add(path)
        else:
            self.attributes.setdefault(".".join(outer), set()).add(last)
        self.around |= {".".join(outer[: i + 1]) for i in range(len(outer))}

    def walk(self, module: nn.Module, path: str, whole: bool) -> None:
        """Write a module and below; of one that is not `whole` only what was asked for."""
        if whole and id(module) in self.written:
            self.records.append({"path": path, "same": self.written[id(module)]})
            return
        if whole:
            self.written[id(module)] = path
        with located(f"module {path or '(root)'} ({type(module).__name__})"):
            self.records.append(self._record(module, path, whole))
        for name, child in module._modules.items():
            below = f"{path}.{name}" if path else name
            inside = whole or below in self.modules
            if child is not None and (inside or below in self.around):
                self.walk(child, below, inside)

    def _record(self, module: nn.Module, path: str, whole: bool) -> dict[str, Any]:
        wanted = self.attributes.get(path, set())
        record: dict[str, Any] = {"path": path}
        if whole:
            _check_hooks(module)
            record["class"] = name_of(type(module))
        record["training"] = module.training
        plain = [name for name in module.__dict__ if name not in _OWN]
        if isinstance(module, nn.RNNBase):
            plain = [name for name in plain if name not in _FLAT]
        parts: dict[str, Any] = {
            "attributes": {n: self._plain(module, n, path) for n in plain if whole or n in wanted},
            "parameters": self._tensors(module._parameters, path, None if whole else wanted),
            "buffers": self._tensors(module._buffers, path, None if whole else wanted),
        }
        passing = set(parts["buffers"]) & module._non_persistent_buffers_set
        absent = [n for n, c in module._modules.items() if c is None and (whole or n in wanted)]
        parts |= {"not_persistent": sorted(passing), "absent": absent}
        return record | {key: part for key, part in parts.items() if part}

    def _plain(self, module: nn.Module, name: str, path: str) -> Any:
        where = f"{path}.{name}" if path else name
        count = 0

        def tensor(value: Any) -> dict[str, Any] | None:
            nonlocal count
            if not isinstance(value, Tensor):
                return None
            label = f"{where}:{count}"
            count += 1
            return {"tensor": self.tensors.add(value, label)}

        try:
            return encode(module.__dict__[name], tensor)
        except InputError as error:
            raise InputError(
                f"attribute {name!r} holds {error}, which cannot be written; keep it out of the "
                "module (a plain value, a tensor or a submodule will do), or replace the module "
                "by one of torch's"
            ) from error

    def _tensors(
        self, found: Mapping[str, Tensor | None], path: str, wanted: set[str] | None
    ) -> dict[str, str | None]:
        return {
            name: None if t is None else self.tensors.add(t, f"{path}.{name}" if path else name)
            for name, t in found.items()
            if wanted is None or name in wanted
        }


def _check_hooks(module: nn.Module) -> None:
    if parametrize.is_parametrized(module):
        raise InputError(
            "has parametrizations, which cannot be written; make them plain weights with "
            "torch.nn.utils.parametrize.remove_parametrizations before saving"
        )
    set_hooks = [name for name in _OWN - _PARTS if module.__dict__.get(name)]
    if set_hooks:
        raise InputError(
            f"has hooks ({', '.join(sorted(set_hooks))}), which cannot be written; remove them "
            "before saving (weight norm has one: torch.nn.utils.remove_weight_norm)"
        )


def read_modules(records: list[dict[str, Any]], names: Names, tensors: TensorReader) -> nn.Module:
    """The tree that `write_modules` wrote."""
    made: dict[str, nn.Module] = {}
    for record in records:
        path = record["path"]
        with located(f"module {path or '(root)'}"):
            if path:
                check_path(path)
            if path in made:
                raise InputError("stands there twice")
            module = made[record["same"]] if "same" in record else _make(record, names, tensors)
            made[path] = module
            outer, _, name = path.rpartition(".")
            if path:
                made[outer]._modules[name] = module
    for module in made.values():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return made[""]


def _make(record: dict[str, Any], names: Names, tensors: TensorReader) -> nn.Module:
    kind = names.layer(record["class"]) if "class" in record else nn.Module
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.training = bool(record["training"])
    for name, data in record.get("attributes", {}).items():
        if name in _OWN or name.startswith("__"):
            raise InputError(f"attribute {name!r} is not a file's to set")
        with located(f"attribute {name!r}"):
            module.__dict__[name] = decode(data, names, {"tensor": tensors.__getitem__})
    for name, key in record.get("parameters", {}).items():
        parameter = None if key is None else tensors[key]
        if parameter is not None and not isinstance(parameter, nn.Parameter):
            raise InputError(f"{name} is no parameter")
        module._parameters[name] = parameter
    for name, key in record.get("buffers", {}).items():
        module._buffers[name] = None if key is None else tensors[key]
    module._non_persistent_buffers_set = set(record.get("not_persistent", ()))
    module._modules.update(dict.fromkeys(record.get("absent", ())))
    return module
