"""From a description to source text, a module, and arguments for it."""

import hashlib
import linecache
import sys
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

import tests.fuzz.parts  # noqa: F401 - fills the catalogue
from revcompile.ir.coupling_ops import seed_torch
from tests.fuzz.net import Net, write_part
from tests.fuzz.writer import CONDITION, PRELUDE, WIDTH, Writer

Sizes = tuple[int, int]
"""Batch size, and the length of sequences or the side of images."""
LENGTH: Final = 5
BATCHES: Final = (3, 4, 7)
"""Of the example; another; one on the other side of the nets' conditions."""
WORDS: Final = 9


def written(net: Net) -> Writer:
    """All lines of a net."""
    w = Writer(net.layout)
    stem = {
        "rows": f"nn.Linear(7, {WIDTH})",
        "tokens": f"nn.Linear(7, {WIDTH})",
        "images": f"nn.Conv2d(3, {WIDTH}, 3, padding=1)",
        "words": f"nn.Embedding({WORDS}, {WIDTH})",
    }[net.layout]
    w.init(f"self.stem = {stem}")
    w.line("h = self.stem(x)")
    if net.layout == "words":
        w.init(f"self.positions = nn.Parameter(torch.randn(12, {WIDTH}))")
        w.line("h = h + self.positions[: x.shape[1]]")
    for one in net.parts:
        write_part(w, one)
    w.init(f"self.head = nn.Linear({w.width}, 5)")
    _extra(w, net)
    return w


def _extra(w: Writer, net: Net) -> None:
    if net.extra == "frozen":
        w.init("self.stem.weight.requires_grad_(False)")
    elif net.extra == "unused":
        w.init("self.unused = nn.Linear(2, 2)")
    elif net.extra == "tied" and net.layout == "words" and w.width == WIDTH:
        w.init(f"self.head = nn.Linear({WIDTH}, {WORDS}, bias=False)")
        w.init("self.head.weight = self.stem.weight")
    elif net.extra == "sparse" and net.layout == "words":
        w.scope.init[0] = w.scope.init[0].replace(")", ", sparse=True)")
    elif net.extra == "bare":
        w.init("self.offset = nn.Parameter(torch.randn(()))")
        w.line("h = h + self.offset")


def source(net: Net) -> str:
    """The net as a Python file that defines `Net`."""
    w = written(net)
    scope = w.scopes[0]
    pooled = w.pooled()
    head = "self.head(h)" if net.result == "sequence" and w.sequence else f"self.head({pooled})"
    result = {
        "tuple": f"({head}, h)",
        "dict": f'{{"logits": {head}, "features": {pooled}}}',
        "nested": f'({head}, {{"mean": h.mean(), "pair": [{pooled}, None]}})',
    }.get(net.result, head)
    others = w.inputs[1:]
    given = ["self", "x", *(["*"] if others and net.call == "keywords" else []), *others]
    text = w.class_text("Net", scope, given[1:], result)
    return "\n\n".join([PRELUDE, *w.helpers.values(), text])


def build(net: Net) -> nn.Module:
    """The module, in training mode, with weights that depend on the net's seed alone."""
    text = source(net)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    name = f"<net {digest}>"
    made = sys.modules.get(f"fuzzed_net_{digest}")
    if made is None:
        # Tracebacks and error messages show the lines of the net, as those of any file.
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        made = ModuleType(f"fuzzed_net_{digest}")
        exec(compile(text, name, "exec"), vars(made))
        sys.modules[made.__name__] = made  # pickle finds classes by their names
    seed_torch(net.seed)
    module: nn.Module = vars(made)["Net"]()
    module.to(weight_dtype(net))
    with torch.no_grad():
        for parameter in module.parameters():  # nothing starts at zero, or without effect
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def weight_dtype(net: Net) -> torch.dtype:
    """What weights and inputs are in."""
    return torch.float64 if net.precision == "float64" else torch.float32


def arguments(net: Net, sizes: Sizes, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a call."""
    n, t = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(weight_dtype(net))

    mask = torch.rand((n, t), generator=generator) < 0.7
    mask[:, 0] = True
    values = {
        "x": {
            "rows": normal(n, 7),
            "tokens": normal(n, t, 7),
            "images": normal(n, 3, t, t),
            "words": torch.randint(0, WORDS, (n, t), generator=generator),
        }[net.layout],
        "c": normal(n, CONDITION),
        "mask": mask,
        "scale": normal(WIDTH),
        "e": normal(n, 2, CONDITION),
    }
    w = written(net)
    others = {name: values[name] for name in w.inputs[1:]}
    if net.call == "keywords":
        return (values["x"],), others
    return (values["x"], *others.values()), {}
