"""Make a failing net as small as it can be, and write it down as a script of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.fuzz.module import LENGTH, arguments, source, weight_dtype, written
from benchmarks.fuzz.net import Net, simpler
from benchmarks.fuzz.oracle import METHODS, Finding, examine

__all__ = ["same_finding", "script", "shrink"]


def shrink(net: Net, fails: Callable[[Net], bool], trials: int = 60) -> Net:
    """The simplest net that still fails, found by taking one simplification after the other."""
    progress = True
    while progress and trials > 0:
        progress = False
        for smaller in simpler(net):
            trials -= 1
            if fails(smaller):
                net, progress = smaller, True
                break
            if trials <= 0:
                break
    return net


def same_finding(finding: Finding) -> Callable[[Net], bool]:
    """Does a net show this finding, or one that looks like it? Runs no other checks."""
    first, *rest = finding.check.replace(",", "").split()
    methods = [m for m in METHODS if m in rest]
    phase = {"rewired": "reversify"}.get(first, first)

    def fails(net: Net) -> bool:
        report = examine(net, methods, [phase])
        return any((f.kind, f.check) == (finding.kind, finding.check) for f in report.findings)

    return fails


SCRIPT: Final = '''\
"""{kind}, {check}: {what}

{net}
"""

{source}

import revcompile

torch.manual_seed({seed})
model = Net().to({dtype})
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)


{example}


def loss(output, target=None):
    leaves = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    return sum((t * torch.arange(t.numel()).to(t).view_as(t).cos()).mean() for t in leaves)


def gradients(module):
    return {{name: p.grad for name, p in module.named_parameters()}}


args, kwargs = example({batch}, {length})
{body}
'''
BODIES: Final = {
    "capture": """\
# Every comparison of the graph with the original fails here, if it is wrong.
captured = revcompile.capture(model, args, kwargs, check="full")
print(captured.graph)
""",
    "reversify": """\
net = revcompile.reversify(model, args, kwargs)
runs = []
for net.reversible in (False, True):
    net.zero_grad()
    torch.manual_seed(0)
    loss(net(*args, **kwargs)).backward()
    runs.append({n: g if g is None else g.clone() for n, g in gradients(net).items()})
loss(model(*args, **kwargs)).backward()
for name, stored in runs[0].items():
    print(name, "stored", stored, "reversible", runs[1][name])
    print("    original", gradients(model).get(name))
""",
    "other": """\
net = revcompile.reversify(model, args, kwargs)
for batch, length in ((7, 5), (3, 8), (4, 4)):
    args, kwargs = example(batch, length)
    anew = revcompile.reversify(model, args, kwargs)
    print(batch, length, "same", net(*args, **kwargs), "compiled anew", anew(*args, **kwargs))
""",
    "petrafy": """\
staged = revcompile.petrafy(model, {stages}, args, kwargs)
reference = staged.module()
reference.reversible = False
loss(reference(*args, **kwargs)).backward()
found = {{}}


def optimizer(parameters):
    made = torch.optim.SGD(parameters, lr=0.0)
    made.register_step_pre_hook(lambda *_: found.update({{id(p): p.grad for p in parameters}}))
    return made


trainer = staged.trainer(optimizer, loss, method="{method}")
inputs = {{"x": args[0], **kwargs}} if kwargs else args
trainer.step(inputs)
trainer.flush()
for name, parameter in trainer.parameters().items():
    print(name, "staged", found.get(id(parameter)), "autograd", gradients(reference)[name])
""",
}


def script(net: Net, finding: Finding) -> str:
    """The finding as a Python file that needs nothing but torch and revcompile."""
    first, _, rest = finding.check.replace(",", "").partition(" ")
    body = BODIES[first if first in BODIES else "reversify"]
    if first == "petrafy":
        body = body.format(
            stages=net.stages,
            method=rest if rest in ("backprop", "1f1b", "petra_stashed") else "petra",
        )
    return SCRIPT.format(
        kind=finding.kind,
        check=finding.check,
        what=finding.what.splitlines()[0].replace('"""', "'''"),
        net=net,
        source=source(net).strip(),
        seed=net.seed,
        dtype=weight_dtype(net),
        example=_example(net),
        batch=3,
        length=LENGTH,
        body=body,
    )


def _example(net: Net) -> str:
    """Code of a function that makes arguments."""
    args, kwargs = arguments(net, (3, LENGTH), 0)
    names = dict(zip(written(net).inputs, args, strict=False)) | kwargs
    dtype = weight_dtype(net)
    made = {
        "c": f"torch.randn(n, 4, dtype={dtype})",
        "mask": "torch.ones(n, t, dtype=torch.bool)",
        "scale": f"torch.randn(6, dtype={dtype})",
        "e": f"torch.randn(n, 2, 4, dtype={dtype})",
        "x": {
            "rows": f"torch.randn(n, 7, dtype={dtype})",
            "tokens": f"torch.randn(n, t, 7, dtype={dtype})",
            "images": f"torch.randn(n, 3, t, t, dtype={dtype})",
            "words": "torch.randint(0, 9, (n, t))",
        }[net.layout],
    }
    positional = "".join(f"{made[n]}, " for n in names if n not in kwargs)
    keywords = ", ".join(f'"{n}": {made[n]}' for n in kwargs)
    return (
        f"def example(n, t):\n    torch.manual_seed(1)\n    return ({positional}), {{{keywords}}}"
    )
