"""Put a net through capture, reversify and petrafy and compare everything with autograd.

Every difference and every exception that is not one of revcompile's own is a finding. A refusal of
revcompile is none, and is counted by its reason.
"""

import copy
import functools
import io
import pickle
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import revcompile
from revcompile.compiler.capture import capture
from revcompile.compiler.capture.random_draws import DrawsLeftOut
from revcompile.errors import InputError, RevcompileError, RevcompileWarning, VerificationError
from revcompile.ir.coupling_ops import seed_torch
from revcompile.ir.module_tree import copy_module
from revcompile.ir.signature import bind
from revcompile.runtime.reversible.guards import GuardChecker
from tests.fuzz.compare import (
    Call,
    Seen,
    Values,
    autocasting,
    difference,
    distance,
    loss,
    observe,
    rounded_outputs,
)
from tests.fuzz.module import BATCHES, LENGTH, Sizes, arguments, build
from tests.fuzz.net import Net, simpler
from tests.recorded import with_gradients

PHASES: Final = ("capture", "reversify", "copied", "autocast", "other", "petrafy")
METHODS: Final = ("petra", "backprop", "1f1b", "petra_stashed")
OTHERS: Final[tuple[Sizes, ...]] = ((BATCHES[2], LENGTH), (BATCHES[0], 8), (BATCHES[1], 4))
"""Sizes on the other side of some net's condition."""
RATE: Final = 0.05


@dataclass(frozen=True)
class Finding:
    """Something that must not be.

    `kind` is "wrong" (silently), "foreign" (an exception that is not ours), or "bug": refused by a
    `VerificationError`, which says of itself that it is a bug of the compiler.
    """

    kind: str
    check: str
    what: str
    detail: str = ""


@dataclass(frozen=True)
class Refusal:
    """An error of revcompile: the compiler does not take the net."""

    check: str
    reason: str


@dataclass
class Report:
    """All that came of one net."""

    findings: list[Finding] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    discarded: str | None = None
    """Why the net itself cannot be used as an example."""
    checks: list[str] = field(default_factory=list)
    """What was compared."""


def normalised(text: str) -> str:
    """A message without the names, numbers and lines of one net."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    line = re.sub(r" ?\[[^\]]*(?:\]|$)|\(at .*?\)|<net [0-9a-f]+>", "", line)
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", line)
    line = re.sub(r"\b(?:self\.)?[a-z_]+\d+(?:\.[\w.]+)?", "…", line)
    return re.sub(r"[-\d.]*\d(?:e[-+]?\d+)?", "#", line)[:160]


def reason(error: RevcompileError | RevcompileWarning) -> str:
    """Why a net was refused, without its own names."""
    lines = [line.strip() for line in str(error).splitlines()]
    numbered = [line for line in lines if re.match(r"\d+\. ", line)]
    text = numbered[0] if numbered else " ".join(lines[:2])
    kind = type(error).__name__
    return f"{kind}: {normalised(text)}"


class _Stop(Exception):
    """Nothing further can be said of this net."""


class Examination:
    """One net on its way through the checks."""

    def __init__(self, net: Net, methods: Sequence[str], backend: str | None = None) -> None:
        self.net, self.methods = net, methods
        self.backend = backend
        """Of `torch.compile`, for chains; if None, they run eagerly."""
        self.report = Report()
        self.sizes = [(batch, LENGTH) for batch in BATCHES[:2]]
        self.original: list[Seen] = []
        self.evaluated: list[Seen] = []
        self.is_random = self.has_memory = False
        self.captured: revcompile.ir.types.Captured | None = None

    # -- reporting ----------------------------------------------------------------------------

    @contextmanager
    def watched(self, check: str, stop: bool = True) -> Iterator[None]:
        """Sort what is raised into refusals and findings; then go on, or stop."""
        try:
            yield
            return
        except _Stop:
            raise
        except VerificationError as error:
            self._found(Finding("bug", check, reason(error), str(error)))
        except (RevcompileError, RevcompileWarning) as error:
            if reason(error) not in {refusal.reason for refusal in self.report.refusals}:
                self.report.refusals.append(Refusal(check, reason(error)))
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).strip()}"
            detail = traceback.format_exc()
            self._found(Finding("foreign", check, what[:300], detail))
        if stop:
            raise _Stop

    def _found(self, finding: Finding) -> None:
        """Keep an exception; `reversify` raises what `petrafy` has raised before."""
        known = {(f.kind, f.what) for f in self.report.findings}
        if finding.check != "reversify" or (finding.kind, finding.what) not in known:
            self.report.findings.append(finding)

    def compare(
        self,
        check: str,
        want: Seen,
        have: Seen,
        *which: str,
        rounding: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Find what differs between two calls; `rounding` is asked only if something does."""
        self.report.checks.append(check)
        for name in which or ("outputs", "gradients", "buffers"):
            values = getattr(want, name), getattr(have, name)
            message = difference(*values, self.net.precision)
            if message is not None and name == "gradients":
                message = difference(*values, self.net.precision, rounding())
            if message is not None:
                self.report.findings.append(Finding("wrong", check, f"{name}: {message}"))

    def rounding(self, stored: nn.Module, calls: Sequence[Call], rate: float = 0.0) -> float:
        """The largest error that rounding alone makes in the gradients of these calls."""
        precision = self.net.precision
        exact = observe(copy_module(stored), calls, precision, rate=rate)
        other = copy_module(stored)
        with rounded_outputs(other):
            rounded = observe(other, calls, precision, rate=rate)
        pairs = zip(exact, rounded, strict=True)
        errors = [distance(a.gradients, b.gradients, precision)[0] for a, b in pairs]
        return max((error for error in errors if error < float("inf")), default=0.0)

    # -- the net itself -----------------------------------------------------------------------

    def call(self, sizes: Sizes, seed: int = 0) -> Call:
        """A call at a batch size and a length."""
        args, kwargs = arguments(self.net, sizes, seed)
        return Call(args, kwargs, seed)

    @property
    def calls(self) -> list[Call]:
        """Two calls, of different batch sizes."""
        return [self.call(sizes, seed) for seed, sizes in enumerate(self.sizes)]

    def look(self) -> None:
        """Run the original: what fails here is no example."""
        precision = self.net.precision
        try:
            self.original = observe(build(self.net), self.calls, precision)
            self.evaluated = observe(build(self.net).eval(), self.calls, precision)
            model, call = build(self.net), self.calls[0]
            one = observe(model, [call, call], precision)
            drawn = torch.get_rng_state()
            seed_torch(call.seed)
        except Exception as error:
            self.report.discarded = f"{type(error).__name__}: {normalised(str(error))}"
            raise _Stop from None
        finite = all(t.isfinite().all() for s in self.original for t in s.outputs.values())
        if not finite:
            self.report.discarded = "its output is not finite"
            raise _Stop
        self.is_random = not torch.equal(drawn, torch.get_rng_state())
        # the targets differ from call to call, so only outputs show what a net remembers
        self.has_memory = difference(one[0].outputs, one[1].outputs, "float64") is not None

    def observe_original(self, model: nn.Module, calls: Sequence[Call]) -> list[Seen]:
        """The original without the random numbers that decide nothing, which no graph draws: those
        drawn after them are the graph's then."""
        with DrawsLeftOut(self.captured.draws if self.captured else ()):
            return observe(model, calls, self.net.precision)

    # -- capture ------------------------------------------------------------------------------

    def capture(self) -> revcompile.ir.types.Captured:
        """The graph against the original, in both modes."""
        call = self.calls[0]
        with self.watched("capture"):
            captured = capture(build(self.net), call.args, call.kwargs)
        self.captured = captured
        if captured.draws:
            self.original = self.observe_original(build(self.net), self.calls)
        for mode, expected in (("training", self.original), ("eval", self.evaluated)):
            with self.watched(f"capture, {mode}", stop=False):
                root = copy_module(captured.root)
                root.train(mode == "training") if mode == "eval" else None
                run = graph_of(captured, root)
                calls = meant_for(captured, root, self.calls)
                have = observe(root, calls, self.net.precision, run=run)
                for want, got in zip(expected, have, strict=False):
                    self.compare(f"capture, {mode}", want, got)
        return captured

    # -- reversify ----------------------------------------------------------------------------

    def reversify(self, staged: revcompile.StagedModel | None) -> nn.Module:
        """Reversible chains against the same net with stored activations.

        `petrafy` begins with `reversify`: what it made is used again, which saves a compilation.
        """
        model, call = build(self.net), self.calls[0]
        with self.watched("reversify"):
            if staged is not None:
                net: nn.Module = staged.model
            else:
                net = revcompile.reversify(model, call.args, call.kwargs, policy="paper")
        self._same_modes(model, net)
        self._like_original(net)
        stored, chained = copy_module(net), self.compiled(copy_module(net))
        stored.reversible = False
        start = copy_module(stored)

        def rounding() -> float:
            return self.rounding(start, self.calls, RATE)

        with self.watched("reversify, stored", stop=False):
            for step, call in enumerate(self.calls):
                weights = [p.detach().clone() for p in stored.parameters()]
                (want,) = observe(stored, [call], self.net.precision, rate=RATE)
                with self.watched("reversify, chained", stop=False):
                    _set_weights(chained, weights)
                    (got,) = observe(chained, [call], self.net.precision)
                    self.compare(f"reversify, step {step}", want, got, rounding=rounding)
        return net

    def compiled(self, net: nn.Module) -> nn.Module:
        """The net with compiled couplings, if there is a backend."""
        if self.backend is not None:
            torch._dynamo.reset()
            net.compile(backend=self.backend)
        return net

    def _same_modes(self, model: nn.Module, net: nn.Module) -> None:
        modes = {path: inner.training for path, inner in net.named_modules()}
        for path, inner in model.named_modules():
            if modes.get(path, inner.training) != inner.training:
                what = f"modes: {path} is in {'eval' if inner.training else 'training'} mode"
                self.report.findings.append(Finding("wrong", "reversify, modes", what))

    def _like_original(self, net: nn.Module) -> None:
        """What rewiring must leave as it was: all of a net without reversible blocks; otherwise
        which parameters have a gradient, which buffers move, and how far counters count."""
        with self.watched("rewired", stop=False):
            have = observe(copy_module(net), self.calls, self.net.precision)
            for want, got in zip(self.original, have, strict=True):
                if not net.rewired.couplings:  # type: ignore[union-attr]
                    self.compare("rewired, no blocks", want, got)
                self._same_gradient_paths(want, got)
            before = {name: b.detach().clone() for name, b in net.named_buffers()}
            self._same_moves("rewired", before, have[-1])

    def _same_gradient_paths(self, want: Seen, have: Seen) -> None:
        for name, gradient in want.gradients.items():
            if name not in have.gradients:
                continue
            if gradient is not None and have.gradients[name] is None:
                what = f"gradient path: {name} has a gradient in the original and none here"
                self.report.findings.append(Finding("wrong", "rewired", what))

    def _same_moves(self, check: str, before: Values, have: Seen) -> None:
        """The same buffers move as in the original; counters count the same."""
        start = dict(build(self.net).named_buffers())
        for name, end in self.original[-1].buffers.items():
            got, initial = have.buffers.get(name), before.get(name)
            if end is None or got is None or initial is None:
                continue
            moved = not torch.equal(end, start[name])
            if moved and torch.equal(got, initial):
                what = f"buffers: {name} moves in the original and not here"
            elif not moved and not torch.equal(got, initial):
                what = f"buffers: {name} stays in the original and moves here"
            elif not end.is_floating_point() and check == "rewired" and not torch.equal(end, got):
                what = f"buffers: {name} is {got.tolist()}, not {end.tolist()}"
            else:
                continue
            self.report.findings.append(Finding("wrong", f"{check}, state", what))

    # -- copies and autocast ------------------------------------------------------------------

    def copied(self, net: nn.Module) -> nn.Module:
        """Copies of a net against the net itself; returns one that was stored."""
        twins: dict[str, nn.Module] = {}
        try:
            pickle.dumps(build(self.net))
        except Exception:
            return net  # nor does pickle take the original
        for how, function in COPIES.items():
            with self.watched(f"copied, {how}", stop=False):
                twins[how] = function(net)
        precision = self.net.precision
        for how, twin in twins.items():
            with self.watched(f"copied, {how}", stop=False):
                want = observe(copy_module(net), self.calls, precision)
                have = observe(copy_module(twin), self.calls, precision)
                for expected, got in zip(want, have, strict=True):
                    self.compare(f"copied, {how}", expected, got)
        return twins.get("pickle", net)

    def autocast(self, net: nn.Module) -> None:
        """Chains against stored activations under autocast, where the net is compiled as well."""
        precision = "bfloat16"
        low = Examination(replace(self.net, precision=precision), self.methods, self.backend)
        low.report = self.report
        call = low.call(self.sizes[0])
        try:
            observe(build(low.net), low.calls, precision)
        except Exception:
            return  # the original does not run under autocast
        with self.watched("autocast", stop=False):
            model = build(low.net)  # torch makes no orthogonal parametrization under autocast
            with autocasting(precision):
                inside: Any = revcompile.reversify(
                    model, call.args, call.kwargs, policy="paper", check="off"
                )
            counts = [len(each.rewired.couplings) for each in (inside, net)]
            if counts[0] != counts[1]:
                what = f"couplings: {counts[0]} if compiled under autocast, {counts[1]} outside"
                self.report.findings.append(Finding("wrong", "autocast", what))
            if self.net.precision == precision:
                return  # compared as all are
            stored, start = copy_module(inside), copy_module(inside)
            stored.reversible = start.reversible = False
            self.compiled(inside)
            want, have = (observe(each, low.calls, precision) for each in (stored, inside))
            for expected, got in zip(want, have, strict=True):
                low.compare(
                    "autocast", expected, got, rounding=lambda: low.rounding(start, low.calls)
                )

    # -- other sizes and attributes -----------------------------------------------------------

    def other_cases(self, captured: revcompile.ir.types.Captured, net: nn.Module) -> None:
        """Calls that take another path through the net's Python: the new path, or an error."""
        for sizes in OTHERS:
            self._other_case(captured, net, f"size {sizes}", sizes, lambda module: None)
        if hasattr(build(self.net), "alpha"):

            def change(module: nn.Module) -> None:
                module.alpha = 2.0  # type: ignore[assignment]

            self._other_case(captured, net, "attribute", self.sizes[0], change)

    def _other_case(
        self,
        captured: revcompile.ir.types.Captured,
        net: nn.Module,
        name: str,
        sizes: Sizes,
        change: Callable[[nn.Module], None],
    ) -> None:
        call, precision = self.call(sizes, 3), self.net.precision
        model = build(self.net)
        change(model)
        try:
            want = self.observe_original(model, [call])[0]
        except Exception:
            return  # the original does not take it either
        if self._graph_agrees(captured, call, want, change):
            return
        # The graph is for the sizes of the example alone: calling the net must not run it.
        check = f"other {name.split()[0]}"
        with self.watched(check, stop=False):
            changed = copy_module(net)
            change(changed)
            have = observe(changed, [call], precision)[0]
            again = build(self.net)
            change(again)
            anew = revcompile.reversify(again, call.args, call.kwargs, policy="paper", check="off")
            expected = observe(anew, [call], precision)[0]
            self.compare(check, expected, have, "outputs")

    def _graph_agrees(
        self,
        captured: revcompile.ir.types.Captured,
        call: Call,
        want: Seen,
        change: Callable[[nn.Module], None],
    ) -> bool:
        try:
            root = copy_module(captured.root)
            change(root)
            have = observe(root, [call], self.net.precision, run=graph_of(captured, root))[0]
        except Exception:
            return False
        return difference(want.outputs, have.outputs, self.net.precision) is None

    # -- petrafy ------------------------------------------------------------------------------

    def stage(self) -> revcompile.StagedModel | None:
        """The net in as many stages as it was drawn for, or fewer if it is too short."""
        call = self.calls[0]
        with self.watched("petrafy", stop=False):
            for stages in range(self.net.stages, 0, -1):
                try:
                    with self.reusing_captured():
                        return revcompile.petrafy(
                            build(self.net), stages, call.args, call.kwargs, policy="paper"
                        )
                except InputError as error:
                    if "num_stages" not in str(error) or stages == 1:
                        raise
        return None

    @contextmanager
    def reusing_captured(self) -> Iterator[None]:
        """Compilation begins with a copy of what was captured before, which saves a third of it."""
        try:
            captured = copy.deepcopy(self.captured)
        except RuntimeError:  # a net with `weight_norm` holds tensors that cannot be copied
            captured = None
        if captured is None:
            yield
            return
        with mock.patch.object(revcompile.api, "capture", lambda *_, **__: captured):
            yield

    def petrafy(self, staged: revcompile.StagedModel) -> None:
        """Gradients of every micro-batch, at learning rate 0, against autograd."""
        start = copy_module(staged.model)
        fed = [self.call((batch, LENGTH), seed) for seed, batch in enumerate((3, 3, 3, 4))]
        reference = None
        module = staged.to_module()
        module.reversible = False  # type: ignore[assignment]
        stored = copy_module(module)

        def rounding() -> float:
            return self.rounding(stored, fed)

        if not self.is_random:
            with self.watched("petrafy, stored"):
                reference = observe(module, fed, self.net.precision)
        methods = [m for m in self.methods if m != "backprop"]
        if self.is_random or len(methods) < len(self.methods):
            methods.insert(0, "backprop")
        for method in methods:
            staged.model.load_state_dict(start.state_dict())
            with self.watched(f"petrafy {method}", stop=False):
                have = self._trained(staged, method, fed)
                # masks depend on the stage: random nets are compared with kept graphs
                reference = reference or have
                if self.has_memory and method.startswith("petra"):
                    continue  # what a net remembers has not moved on yet when it is late
                for want, got in zip(reference, have, strict=True):
                    names = {n: g for n, g in want.gradients.items() if "input " not in n}
                    want = Seen(want.outputs, names, want.buffers)
                    self.compare(f"petrafy {method}", want, got, "gradients", rounding=rounding)
                want, got = reference[-1], have[-1]
                if method.startswith("petra"):
                    want, got = (_without(seen, self.shared_norms) for seen in (want, got))
                self.compare(f"petrafy {method}", want, got, "buffers")
                before = dict(start.named_buffers())
                self._same_moves(f"petrafy {method}", before, have[-1])

    @functools.cached_property
    def shared_norms(self) -> tuple[str, ...]:
        """Batch norms that run more than once in a call.

        Reversible stages move running statistics in the backward pass, so such a norm sees the
        batches of its calls in reverse order.
        """
        model, counts = build(self.net), Counter[str]()
        for path, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                module.register_forward_hook(lambda *_, path=path: counts.update([path]))
        call = self.call(self.sizes[0])
        model(*call.args, **call.kwargs)
        return tuple(f"{path}." for path, count in counts.items() if count > 1)

    def _trained(
        self, staged: revcompile.StagedModel, method: str, fed: Sequence[Call]
    ) -> list[Seen]:
        low = torch.bfloat16 if self.net.precision == "bfloat16" else None
        inputs = (_as_inputs(staged, call) for call in fed)
        data = [(x, torch.tensor(0.1 * index)) for index, x in enumerate(inputs, 1)]
        trainer, steps = with_gradients(staged, data, loss, method=method, autocast=low)
        buffers = {name: b.detach().clone() for name, b in trainer.model.named_buffers()}
        every: Values = {name: None for name, _ in trainer.named_parameters()}
        return [Seen({}, {**every, **step}, buffers) for step in steps]


def _saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


COPIES: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": _saved,
}


def graph_of(captured: revcompile.ir.types.Captured, root: nn.Module) -> Callable[..., Any]:
    """The captured graph, called as the original is."""
    training = root.training
    graph, spec = captured.graph, captured.signature.out_spec
    if not training:
        graph = captured.eval_graph or graph
        spec = captured.signature.eval_out_spec or spec

    def run(*args: Any, **kwargs: Any) -> Any:
        values = bind(captured.signature, captured.name, args, kwargs)
        inputs = [values[name] for name in captured.signature.placeholders]
        flat = fx.Interpreter(root, graph=graph).run(*inputs)
        return pytree.tree_unflatten(list(flat), spec)

    return run


def meant_for(
    captured: revcompile.ir.types.Captured, root: nn.Module, calls: Sequence[Call]
) -> list[Call]:
    """The calls up to the first that the graph is not for: those are captured anew, or refused."""
    checker, found = GuardChecker(captured.guards, root), list[Call]()
    for call in calls:
        values = bind(captured.signature, captured.name, call.args, call.kwargs)
        if checker.failing(root, values) is not None:
            break
        found.append(call)
    return found


def _as_inputs(staged: revcompile.StagedModel, call: Call) -> Any:
    """What `trainer.step` takes: positional arguments, or all of them by name."""
    if not call.kwargs:
        return call.args
    bound = staged._partition.rewired.signature.forward.bind(*call.args, **call.kwargs)
    return dict(bound.arguments)


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Without torch's fused encoder layer for inference.

    It ignores autocast on the CPU: a layer's results have another dtype with gradients than
    without.
    """
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def _ignore_warnings() -> None:
    """All but the one that says that gradients are inexact: it counts as a refusal."""
    warnings.simplefilter("ignore")
    inexact = ".*reconstructs its input only"
    warnings.filterwarnings("error", message=inexact, category=RevcompileWarning)


def examine(
    net: Net,
    methods: Sequence[str] = METHODS,
    phases: Sequence[str] = PHASES,
    backend: str | None = None,
) -> Report:
    """All checks of one net, or those of some phases; with a backend, chains are compiled."""
    one = Examination(net, methods, backend)
    with warnings.catch_warnings(), torch.random.fork_rng(), _no_fast_path():
        _ignore_warnings()
        try:
            one.look()
            captured = one.capture() if {"capture", "other"} & {*phases} else None
            staged = one.stage() if {*PHASES[1:]} & {*phases} else None
            if {*PHASES[1:-1]} & {*phases}:
                reversible = one.reversify(staged)
                if "autocast" in phases:
                    one.autocast(reversible)
                if "copied" in phases:
                    reversible = one.copied(reversible)
                if captured is not None and "other" in phases:
                    one.other_cases(captured, reversible)
            if staged is not None and "petrafy" in phases:
                one.petrafy(staged)
        except _Stop:
            pass
    return one.report


def shrink(net: Net, finding: Finding, backend: str | None = None, trials: int = 60) -> Net:
    """The simplest net with this finding, one simplification after the other."""
    first, *rest = finding.check.replace(",", "").split()
    methods = [m for m in METHODS if m in rest]
    phase = {"rewired": "reversify"}.get(first, first)
    while True:
        for smaller in simpler(net):
            trials -= 1
            found = examine(smaller, methods, [phase], backend).findings
            if any((f.kind, f.check) == (finding.kind, finding.check) for f in found):
                net = smaller
                break
            if trials <= 0:
                return net
        else:
            return net


def _set_weights(module: nn.Module, weights: Sequence[Tensor]) -> None:
    """Begin a step with the same weights: copies that differ by a rounding of the step before may
    fall on different sides of a jump (`frexp`, `round`)."""
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.copy_(weight)


def _without(seen: Seen, paths: tuple[str, ...]) -> Seen:
    kept = {name: b for name, b in seen.buffers.items() if not name.startswith(paths)}
    return Seen(seen.outputs, seen.gradients, kept)
