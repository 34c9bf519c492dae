"""A rewired model as an ordinary `nn.Module` that trains without storing activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import GuardError, InputError
from revcompile.ir.compiled import (
    Compiler,
    compiler_of_trace,
    compiling,
    number_of_trace,
)
from revcompile.ir.module_tree import TreeReads, device_of_model
from revcompile.ir.policy import POLICY_MARK
from revcompile.ir.snapshot import STRUCTURE, Kind, TreeSnapshot, read_by
from revcompile.ir.types import Body, Coupling, Live, Opaque, Rewired
from revcompile.ir.weight_expansion import WeightExpansion, grow
from revcompile.kernels.autocast import LOW_PRECISION, is_autocasting
from revcompile.kernels.layout import is_traced
from revcompile.runtime.reversible.bindings import (
    Bindings,
    ShardedModule,
    reshard,
    tap_stored,
    unshard,
)
from revcompile.runtime.reversible.block import Block
from revcompile.runtime.reversible.coupling import Chain
from revcompile.runtime.reversible.guards import Cases
from revcompile.runtime.reversible.keeping import NOTHING_KEPT, Budget, ChainMemory, Memory
from revcompile.runtime.reversible.module_guards import Inlined
from revcompile.runtime.reversible.original import (
    Original,
    OriginalSurface,
    SignedForward,
    in_method_of_original,
)
from revcompile.runtime.reversible.overlap import Overlap
from revcompile.runtime.reversible.piece import Piece, recomputes
from revcompile.runtime.reversible.reconstruction import Tolerance
from revcompile.runtime.reversible.replay import ReplayContext
from revcompile.runtime.reversible.transforms import is_transformed


class _Step(NamedTuple):
    """An opaque segment, or a chain."""

    run: Piece | Chain
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    drop: tuple[str, ...]
    """Values that are not read afterwards."""
    sharded: tuple[ShardedModule, ...] = ()
    """For an opaque segment: the FSDP2 modules that its layers belong to."""


class _Plan(NamedTuple):
    steps: tuple[_Step, ...]
    modules: TreeSnapshot
    """The modules that the steps read: how they run, and their hooks."""


class Reversible(OriginalSurface):
    """Runs a `Rewired` model. Parameters and buffers keep the original's names.

    In training mode with gradients on, chains rebuild what `memory_budget` does not keep; in eval
    mode or under `no_grad` everything is a plain forward.

    Args:
        rewired: the model after rewiring; its root's parameters and buffers become this module's.
        tolerance: the largest relative error of a rebuilt input; "auto": by the dtype of the
            streams; None: no check.
        overlap: whether a block is rebuilt while the next one is differentiated.

    Raises:
        InputError: a member of the model has a name that this module needs itself.
    """

    def __init__(
        self, rewired: Rewired, tolerance: Tolerance = None, overlap: Overlap = Overlap.OFF
    ) -> None:
        super().__init__()
        root, reserved = rewired.root, self._reserved_names()
        taken = reserved & {*root._modules, *root._parameters, *root._buffers}
        if taken:
            raise InputError(
                f"reversify: {rewired.name} has a member called {sorted(taken)[0]!r}, a name the "
                "reversible module needs for itself; rename it in the model"
            )
        self._modules.update(root._modules)
        self._parameters.update(root._parameters)
        self._buffers.update(root._buffers)
        self._non_persistent_buffers_set.update(root._non_persistent_buffers_set)
        for name, value in root.__dict__.items():
            if name not in self.__dict__ and isinstance(value, Tensor):
                self.__dict__[name] = value
        self.training = root.training
        self.__dict__["rewired"] = replace(rewired, root=self)
        self.__dict__["tolerance"] = tolerance
        self.__dict__["reversible"] = True
        self.__dict__["overlap"] = overlap
        self.__dict__["compiler"] = self.__dict__["_latest_compiler"] = None
        self.__dict__["_memory"] = Memory()
        self.__dict__["_plans"] = {}
        self.__dict__["_original"] = Original.adopted_by(self, root, reserved)
        self.__dict__["_inlined"] = Inlined(rewired, self)
        # A forward set on the instance may be another function than its class's.
        is_original = rewired.policy.averaged and "forward" not in vars(root)
        self.__dict__["_keeps_function"] = is_original
        self.__dict__["_cases"] = Cases(self.rewired)
        self.__dict__["_constants_device"] = device_of_model(self)
        self.register_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_refuse_other_function)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_grow_state_dict)  # type: ignore[no-untyped-call]

    rewired: Rewired
    tolerance: Tolerance
    """The largest relative error of a rebuilt input (see the class)."""
    reversible: bool
    """Set to False to run chains as plain operations: the reference with stored activations."""
    overlap: Overlap
    """Whether a block is rebuilt while the next one is differentiated. Read at the first call."""
    compiler: Compiler | None
    """What compiles the couplings (`compile`); None: they run eagerly."""
    _latest_compiler: Compiler | None
    """What compiled them in the latest call, which may be one of `torch.compile(net)`."""
    _memory: Memory
    """What decides which couplings keep their graphs."""
    _plans: dict[int, _Plan]
    _inlined: Inlined
    _cases: Cases
    _constants_device: torch.device
    """Where parameters and buffers were when constants were placed last."""

    @SignedForward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the original's calling convention."""
        if torch.compiler.is_dynamo_compiling():
            return _called_by_dynamo(self, number_of_trace(), args, kwargs)
        return self._call(args, kwargs, self.compiler)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile couplings and other pieces by `torch.compile`, when they are first called.

        Takes the options of `torch.compile`, and means the same as `torch.compile(net, ...)`.
        Blocks of one structure share what is compiled. Modes that capture CUDA graphs, and
        `fullgraph=True`, are refused; `disable=True` switches back.
        """
        options = dict(zip(("fullgraph", "dynamic", "backend"), args, strict=False)) | kwargs
        self.__dict__["compiler"] = None if options.pop("disable", False) else Compiler(options)

    def _run_eagerly(self, compiler: Compiler) -> dict[str, str]:
        """Pieces that are not compiled, by name, and why."""
        eager = dict(compiler.failures)
        for step in (step for plan in self._plans.values() for step in plan.steps):
            pieces = [(step.run.name, step.run.stateful)] if isinstance(step.run, Piece) else []
            if isinstance(step.run, Chain):
                blocks = step.run.blocks
                pieces = [(block.name, block.replay_context.stateful) for block in blocks]
                eager |= {b.name: "it has hooks" for b in blocks if b.bindings.hooks.run_in_forward}
            eager |= {name: "it writes to buffers" for name, seen in pieces if seen.have_changed}
        return eager

    @property
    def memory_budget(self) -> Budget:
        """What a training step may hold beside parameters, gradients and batch.

        Bytes, also as "8GiB"; "auto": four fifths of what the device has free; "least": every
        coupling is rebuilt; None: on CUDA, couplings that do not raise the peak keep their graphs.
        """
        return self._memory.budget

    @memory_budget.setter
    def memory_budget(self, budget: Budget) -> None:
        self._memory.set(budget)

    def _call(self, args: Any, kwargs: Any, compiler: Compiler | None) -> Any:
        self.__dict__["_latest_compiler"] = compiler
        try:
            rewired, values = self._case(args, kwargs)
        except InputError as error:
            is_other_call = not isinstance(error, GuardError) and self._computes_original
            if not is_other_call or self._original.kind is None:
                raise
            view: Any = self._original.view(self)
            # Not `view.forward`: a wrapper set on this module (accelerate's) would call it again.
            return type(view).forward(view, *args, **kwargs)
        body, out_spec = rewired.body, rewired.signature.out_spec
        if rewired.eval_body is not None and not self.training:
            body, out_spec = rewired.eval_body, rewired.signature.eval_out_spec or out_spec
        kept, meter = frozenset[int](), None
        if self._stores_nothing:
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
            kept, meter = self._memory.begin(self, rewired, tensors, compiler is not None)
        with compiling(compiler):
            found = self._run(body, values, compiler, None, ChainMemory(0, kept, meter))
        if meter is not None:
            meter.end_forward(list(found.values()))
        if rewired.stored and self._stores_nothing:
            tap_stored(self, rewired.stored)
        flat = [found[leaf.name] if isinstance(leaf, Live) else leaf for leaf in body.result]
        return pytree.tree_unflatten(flat, out_spec)

    def _inversion_errors(self, *args: Any, **kwargs: Any) -> list[tuple[str, float]]:
        """Run every chain forward and back; returns each block's relative reconstruction error."""
        errors: list[tuple[str, float]] = []
        rewired, values = self._case(args, kwargs)
        with torch.no_grad():
            self._run(rewired.body, values, self.compiler, errors)
        return errors

    @property
    def _stores_nothing(self) -> bool:
        """Whether a call now keeps no graph of its chains, and rebuilds them in backward."""
        is_training = self.reversible and self.training and torch.is_grad_enabled()
        return is_training and not is_traced() and not is_transformed()

    def _case(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Rewired, dict[str, Any]]:
        """The graph whose guards hold for a call, and its inputs."""
        only_known = self._computes_original or in_method_of_original()
        return self._cases.bound(self, args, kwargs, only_known)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._place_constants()
        return result

    def _place_constants(self) -> None:
        """Move constants from the device where the model was to where it is now.

        They keep their type, and their values while the model is on the meta device.
        """
        before, now = self._constants_device, device_of_model(self)
        if now == before or now.type == "meta":
            return
        source = torch.device("cpu") if before.type == "meta" else before
        for module, name in TreeReads(self._cases.graphs, self).constants:
            own = vars(module)
            if own[name].device == source:
                own[name] = own[name].to(now)
        self.__dict__["_constants_device"] = now

    def __prepare_scriptable__(self) -> Any:
        raise InputError(
            "torch.jit.script compiles Python code, and the code of this module is generated: "
            "export it with torch.export.export(net, inputs), or script net.to_original()"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Capturing again needs the original's class, which pickle finds by its name or not at all.
        recapture = self._cases.recapture if self._original.importable_kind else None
        cases = self._cases.first_only(recapture)
        state = {**self.__dict__, "_plans": {}, "_cases": cases, "compiler": None}
        state["_latest_compiler"] = None
        state.pop("_compiled_call_impl", None)  # it would run this module, as in nn.Module
        return state

    def _run(
        self,
        body: Body,
        values: dict[str, Any],
        compiler: Compiler | None = None,
        errors: list[tuple[str, float]] | None = None,
        memory: ChainMemory = NOTHING_KEPT,
    ) -> dict[str, Any]:
        stores_nothing = self._stores_nothing
        for step in self._plan(body):
            inputs = [values[name] for name in step.inputs]
            for name in step.drop:
                values.pop(name, None)
            if isinstance(step.run, Chain):
                a, b, cast = inputs[0], inputs[1], None
                is_wide = self.training or errors is not None or not step.run.averaged
                if is_wide and not step.run.keeps_inputs(a, b):
                    a, b, cast = _float32_streams(a, b)
                del inputs[:2]
                if errors is not None:
                    (a, b, *extras), of_blocks = step.run.inspect(a, b, inputs, cast, compiler)
                    errors += of_blocks
                else:
                    plain = partial(step.run.plain, training=self.training)
                    reversible = partial(step.run.reversible, memory=memory)
                    run = reversible if stores_nothing else plain
                    a, b, *extras = run(a, b, inputs, cast, compiler)
                    memory = replace(memory, first=memory.first + len(step.run.blocks))
                if cast is not None:
                    a, b = a.to(cast), b.to(cast)
                outputs: Sequence[Any] = (a, b, *extras)
            else:
                inputs = list(unshard(step.sharded, tuple(inputs)))
                outputs = step.run(inputs, compiler, stores_nothing)
                outputs = reshard(step.sharded, tuple(outputs))
            del inputs
            values.update(zip(step.outputs, outputs, strict=True))
        return values

    def _plan(self, body: Body) -> tuple[_Step, ...]:
        """The body's steps, compiled on first use, and again when modules or their hooks change."""
        self._inlined.check()
        key = id(body)
        plan = self._plans.get(key)
        if plan is None or plan.modules.first_change() is not None:
            self._place_constants()  # `fully_shard` moves parameters otherwise than `to` does
            read = read_by([segment.graph for segment in body.segments], self)
            modules = TreeSnapshot(read, (*STRUCTURE, Kind.HOOK))
            plan = self._plans[key] = _Plan(self._steps(body), modules)
        return plan.steps

    def _steps(self, body: Body) -> tuple[_Step, ...]:
        """Group couplings into chains, compile everything, and find each value's last reader."""
        runs = body.chains()
        reads = ((n, index) for index, run in enumerate(runs) for s in run for n in s.inputs)
        last_use = dict(reads)
        steps: list[_Step] = []
        for index, run in enumerate(runs):
            first = run[0]
            if isinstance(first, Opaque):
                inputs, outputs = first.inputs, first.outputs
                bindings = Bindings(first.graph, self)
                context = ReplayContext.of(first, self, list(bindings.modules))
                again = recomputes(first, body, bindings, context)
                code: Piece | Chain = Piece(first, self, bindings, context, again)
                sharded = bindings.sharded
            else:
                couplings = [s for s in run if isinstance(s, Coupling)]
                sides = tuple(dict.fromkeys(n for c in couplings for n in c.all_sides))
                inputs, sharded = (*first.streams_in, *sides), ()
                outputs = couplings[-1].outputs
                position = {name: i for i, name in enumerate(sides)}
                types = [body.types.get(coupling.streams_out[1]) for coupling in couplings]
                blocks = tuple(map(Block, couplings, repeat(self), repeat(position), types))
                code = Chain(blocks, self.tolerance, self.overlap)
            drop = tuple(
                n for n in dict.fromkeys(inputs) if last_use[n] == index and n not in body.returned
            )
            steps.append(_Step(code, inputs, outputs, drop, sharded))
        return tuple(steps)


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a reversible module runs Python around one compiled function per coupling"
)
def _called_by_dynamo(net: Reversible, number: int, args: Any, kwargs: Any) -> Any:
    return net._call(args, kwargs, compiler_of_trace(number))


def _float32_streams(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, torch.dtype | None]:
    """Residual streams in float32, whatever the branches compute in: bfloat16 streams drift.

    Also returns their own dtype, in which branches read them and to which they are cast back; None
    if they are not in low precision, and under autocast.
    """
    if a.dtype not in LOW_PRECISION:
        return a, b, None
    wide = b.float()
    return wide if a is b else a.float(), wide, None if is_autocasting(a.device) else a.dtype


def _mark(module: Any, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Write the policy into a state dict's metadata; the module may be a view (`Original.view`)."""
    if module.rewired.is_another_function:
        metadata[POLICY_MARK] = module.rewired.policy.value


def _refuse_other_function(
    module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *_: Any, **__: Any
) -> None:
    assert isinstance(module, Reversible)
    saved, own = metadata.get(POLICY_MARK), module.rewired.policy.value
    if saved not in (None, own):
        raise InputError(
            f"load_state_dict: these weights were saved with policy={saved!r}, but this "
            f"{module.rewired.name} was made with policy={own!r}, which is another function; "
            f"compile the model with policy={saved!r}"
        )


def _grow_state_dict(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, **__: Any
) -> None:
    """Let a state dict of the original load: enlarge the tensors that rewiring enlarged.

    Norm weights of zeros are revived only if all are zeros, as in an untrained original.
    """
    assert isinstance(module, Reversible)
    expansions = module.rewired.weight_expansions
    revived = (s for s, how in expansions.values() if how is WeightExpansion.REVIVE_ZERO_INIT)
    is_untrained = not any(state[prefix + s].any() for s in revived if prefix + s in state)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    grown: dict[str, Tensor] = {}
    for name, (source, how) in expansions.items():
        have, original = state.get(prefix + name), state.get(prefix + source)
        fits = have is not None and have.shape == own[name].shape
        fits = fits and not (is_untrained and how is WeightExpansion.REVIVE_ZERO_INIT)
        if original is not None and not fits:
            grown[prefix + name] = grow(original, how)
    state.update(grown)
