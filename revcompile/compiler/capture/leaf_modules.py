"""Which modules are leaf modules: one `call_module` node, not traced into.

layers of torch.nn                    always, unless they are containers (`is_leaf`)
what the user names                   `leaf_modules=` (`requested_leaves`)
what tracing cannot enter             see `tracer.py`
what differs between train and eval   a childless module of two structures (`mode_dependent`)
what writes to shared memory          (`innermost_module`)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from torch import fx, nn

from revcompile.compiler.capture.modes import first_difference
from revcompile.errors import InputError, nearest
from revcompile.ir.types import PATH

_DESCEND: Final = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""torch.nn containers that hold residual blocks of their own."""

_CONTAINERS: Final = frozenset(
    {nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}
)

_STOCHASTIC_DEPTH: Final = frozenset(
    ("DropPath", "StochasticDepth", "DropBlock2d", "DropBlock2D", "DropBlock3d")
)
"""Classes of timm, torchvision and others: identity in eval mode, a random mask in train mode.

They are always leaf modules: their drop rate may then be changed from 0 after the capture.
"""


def is_leaf(module: nn.Module) -> bool:
    """Whether the module is, or derives from, a layer of torch.nn, or is stochastic depth."""
    if type(module).__name__ in _STOCHASTIC_DEPTH:
        return True
    is_layer = any(
        cls.__module__.startswith(("torch.nn", "torch.ao.nn")) and cls not in _CONTAINERS
        for cls in type(module).__mro__
    )
    return is_layer and not isinstance(module, _DESCEND)


def requested_leaves(
    model: nn.Module, leaf_modules: Iterable[str | type[nn.Module]]
) -> frozenset[str]:
    """Paths of the modules that a user names by path or class.

    A module with several names is known by its first.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    first_names = {module: path for path, module in model.named_modules()}
    paths: set[str] = set()
    for item in leaf_modules:
        if not isinstance(item, str | type):
            raise InputError(
                f"capture: leaf_modules takes paths and classes of modules, not {item!r}"
            )
        if not isinstance(item, str):
            paths |= {path for module, path in first_names.items() if isinstance(module, item)}
        elif item in modules:
            paths.add(first_names[modules[item]])
        else:
            hint = nearest(item, modules, "see model.named_modules()")
            raise InputError(f"capture: leaf_modules: the model has no {item!r}; {hint}")
    if "" in paths:
        raise InputError("capture: leaf_modules names the whole model, which leaves no graph")
    return frozenset(paths)


def mode_dependent(model: nn.Module, train: fx.Graph, evaluation: fx.Graph) -> tuple[str, ...]:
    """Paths of the childless modules where the structures of two traces first differ.

    All modules of the same class are returned, too: they would differ next.
    """
    for node in first_difference(train, evaluation):
        path = node.meta.get(PATH, "")
        module = model.get_submodule(path)
        if path and not any(module.children()) and not is_leaf(module):
            alike = (p for p, m in model.named_modules() if type(m) is type(module))
            return tuple(p for p in alike if p)
    return ()


def innermost_module(nodes: tuple[fx.Node, ...], leaves: Collection[str]) -> str:
    """The path of the innermost module, not a leaf yet, whose forward made all the nodes.

    Called as a leaf module, it writes to memory that nothing outside it can see. Returns "" if it
    is the model itself.
    """
    paths = [str(node.meta.get(PATH, "")).split(".") for node in nodes]
    common = [a for a, *rest in zip(*paths, strict=False) if all(b == a for b in rest)]
    if nodes[0].op == "call_module" and ".".join(common) == str(nodes[0].target):
        common = common[:-1]
    path = ".".join(common)
    while path in leaves and path:
        path = path.rpartition(".")[0]
    return path
