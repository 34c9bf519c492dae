"""The coupling and chains of couplings: the mathematics everything else builds on.

    forward   (a, b) -> (b, y)   with y = a + F(b)        PETRA, Fig. 2b
    inverse   (b, y) -> (a, b)   with a = y - F(b)        PETRA, Fig. 2c

A chain keeps its output, and the graphs of couplings that the memory budget leaves room for
(`keeping`); short chains may keep inputs instead (`Chain.keeps_inputs`). Otherwise the backward
pass walks from the last block to the first: it rebuilds a block's input *keeping the graph of F*,
and differentiates that very graph: F runs once more and not twice (4N work, not 5N):

    output (b, y) -> rebuild block n: run F(b) with a graph; a = y - F(b)
                     differentiate  : grad b += F'(b)^T grad y, and gradients of the parameters
                  -> (a, b) is the output of block n-1, and so on

Each block is an autograd node of its own: a parameter's gradient is accumulated (and sent, under
DDP) as soon as it is computed, and not at the end of the chain's backward pass. Random numbers,
autocast and buffers are those of the forward pass (`replay`). With `overlap`, block n-1 is rebuilt
while block n is differentiated: rebuilding needs the input of block n, not its gradient. If
branches compute in low precision, addends are rounded to a grid on which float32 sums and their
inverses are exact (`kernels.exact_sum`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from revcompile.errors import InputError, ModifiedError
from revcompile.ir.compiled import CANNOT_COMPILE, Compiler, may_compile
from revcompile.ir.coupling_ops import (
    branch_vjp,
    laid_out_like,
    refusing_other_leaves,
    retaining,
    stream_leaf,
)
from revcompile.ir.snapshot import STRUCTURE, Kind, TreeSnapshot
from revcompile.kernels.autocast import LOW_PRECISION
from revcompile.kernels.exact_sum import grid_for
from revcompile.kernels.fixed_point import random_signs
from revcompile.kernels.layout import alike, is_traced, with_strides
from revcompile.runtime.reversible.bindings import (
    Bound,
    gradient_hooks_silenced,
    reshard,
    unshard,
)
from revcompile.runtime.reversible.block import (
    Added,
    Averaged,
    Block,
    Compiled,
    FixedAverage,
    arranged,
    before_rearrange,
    compiled_block,
    couple,
    rebuild,
)
from revcompile.runtime.reversible.keeping import NOTHING_KEPT, ChainMemory
from revcompile.runtime.reversible.overlap import Overlap, TwoStreams
from revcompile.runtime.reversible.reconstruction import (
    ReconstructionCheck,
    StartedCheck,
    Tolerance,
    relative_error,
    samples_of,
)
from revcompile.runtime.reversible.replay import (
    Replay,
    Surroundings,
    is_capturing,
    without_autocast_cache,
)
from revcompile.runtime.reversible.transforms import (
    differentiable_once,
    is_transformed,
)

_SHORT: Final = 7
"""The most couplings of a chain that keeps inputs (`Chain.keeps_inputs`)."""


class Chain:
    """Couplings in a row, run as one differentiable function that stores no activations."""

    def __init__(self, blocks: tuple[Block, ...], tolerance: Tolerance, overlap: Overlap) -> None:
        self.blocks, self.tolerance, self.overlap = blocks, tolerance, overlap
        self.averaged = blocks[0].averaged
        """Whether streams are averaged; in eval mode they become `b, b + F(b)`."""
        self._convolves = any(block.convolves for block in blocks)
        self.is_short = len(blocks) <= _SHORT and all(block.can_keep_input for block in blocks)
        """Whether the chain runs on streams in low precision as it is (`keeps_inputs`)."""
        self.name = f"the chain {blocks[0].name} .. {blocks[-1].name}"
        self.check = ReconstructionCheck(self.name, tolerance)
        read = [each for block in blocks for each in block.bindings.watched]
        self.modules = TreeSnapshot(read, STRUCTURE)
        """The modules that the chain runs."""
        self._differentiable = TreeSnapshot(read, (Kind.DIFFERENTIABLE,))

    def check_repeatable(self) -> None:
        """Raise if the chain's modules have changed since forward; called before backward."""
        if (change := self.modules.first_change()) is not None:
            raise ModifiedError(
                f"{change.where} was replaced, or wrapped, between a forward pass and its backward "
                "pass, but it is part of a reversible chain, which runs its layers again in "
                "backward; change modules before the forward pass or after backward()"
            )
        if self._differentiable.first_change() is not None:
            self._differentiable.take()
            for block in self.blocks:
                block.leaves_checked = False

    def plain(
        self,
        a: Tensor,
        b: Tensor,
        sides: Sequence[Any],
        cast: torch.dtype | None = None,
        compiler: Compiler | None = None,
        training: bool = True,
    ) -> tuple[Tensor, ...]:
        """The chain as ordinary operations (eval mode, `no_grad`, and the reference in tests)."""
        sums = self._sums(a, b, cast, training, not (is_transformed() or is_traced()))
        a, b = sums.enter(a, b)
        extras: tuple[Tensor, ...] = ()
        compiler, signs = _compiler_for(compiler, a)
        for index, block in enumerate(self.blocks):
            (b,) = unshard(block.sharded, (b,))
            a, b, _ = arranged(block, a, b, sides)
            used = [sides[i] for i in block.sides]
            run = partial(couple, *(block, index, a, b, used, cast, sums), is_rebuilt=False)
            hooked = block.bindings.hooks.run_in_forward
            compiled = None if hooked else compiled_block(block, compiler, signs, a, b, used)
            stateful = block.replay_context.stateful
            is_known = compiler is None or stateful.are_known
            try:
                with nullcontext() if is_known else stateful.recorded():
                    y, extras, *_ = run(compiled)
            except CANNOT_COMPILE as error:
                _note(compiler, block, compiled, error)
                y, extras, *_ = run()
            a, b = b, y
            (b,) = reshard(block.sharded, (b,))
        return a, b, *extras

    def reversible(
        self,
        a: Tensor,
        b: Tensor,
        sides: Sequence[Any],
        cast: torch.dtype | None = None,
        compiler: Compiler | None = None,
        memory: ChainMemory = NOTHING_KEPT,
    ) -> tuple[Tensor, ...]:
        """The chain, which keeps only its output for the backward pass, and some graphs (`memory`).

        `torch.func` and forward-mode AD differentiate operations, not our backward. For those, the
        chain runs as in `plain`.
        """
        if is_transformed():
            return self.plain(a, b, sides, cast)
        if self.keeps_inputs(a, b):
            return self._keeping_inputs(a, b, sides, compiler)
        if memory.meter is not None:
            memory.meter.rebuilds = True
        # A block that is rebuilt early would find its weights sharded.
        overlaps = self.overlap.applies_to(a) and not any(block.sharded for block in self.blocks)
        sums = self._sums(a, b, cast)
        around = Surroundings(a.device)
        call = _Call(self, cast, sums, around, memory, *_compiler_for(compiler, a), overlaps)
        out: tuple[Tensor, ...] = _apply(call, a, b, sides)
        return out

    def keeps_inputs(self, a: Tensor, b: Tensor) -> bool:
        """Whether the streams stay in low precision, and backward has the inputs of branches.

        Rebuilding holds two float32 streams, their gradients and a rebuilt stream. The inputs of
        seven branches, the output and two gradients take no more in low precision. A branch that
        ends low gives a sum in low precision, as in the original.
        """
        return self.is_short and a.dtype == b.dtype and a.dtype in LOW_PRECISION

    def _keeping_inputs(
        self, a: Tensor, b: Tensor, sides: Sequence[Any], compiler: Compiler | None
    ) -> tuple[Tensor, ...]:
        sums = Added(None)
        a, b = sums.enter(a, b)
        compiler, _ = _compiler_for(compiler, b)
        for index, block in enumerate(self.blocks):
            used = [sides[i] for i in block.sides]
            y, _ = sums.add(index, a, b, block.piece((b, *used), compiler, stores_nothing=True))
            a, b = b, y
        return a, b

    def inspect(
        self,
        a: Tensor,
        b: Tensor,
        sides: Sequence[Any],
        cast: torch.dtype | None = None,
        compiler: Compiler | None = None,
    ) -> tuple[tuple[Tensor, ...], list[tuple[str, float]]]:
        """Run forward and back; returns the outputs and each block's reconstruction error."""
        if self.keeps_inputs(a, b):
            return self.plain(a, b, sides, cast), [(block.name, 0.0) for block in self.blocks]
        sums, around, past, errors = self._sums(a, b, cast), Surroundings(a.device), [], []
        extras: tuple[Tensor, ...] = ()
        compiler, signs = _compiler_for(compiler, a)
        with torch.no_grad():
            a, b = sums.enter(a, b)
            for index, block in enumerate(self.blocks):
                replay, given = Replay(block.replay_context, around), (a, b)
                unshard(block.sharded, (b,))
                a, b, shapes = arranged(block, a, b, sides)
                used = [sides[i] for i in block.sides]
                compiled = compiled_block(block, compiler, signs, a, b, used)
                with replay.record():
                    y, extras, _, lost, _ = couple(block, index, a, b, used, cast, sums, compiled)
                a, b = b, y
                reshard(block.sharded, (b,))
                past.append((index, block, replay, given, shapes, lost, compiled))
            result = a, b, *extras
            for index, block, replay, given, shapes, lost, compiled in reversed(past):
                unshard(block.sharded, (b,))
                with replay.again(compiled is not None):
                    used = [sides[i] for i in block.sides]
                    x = stream_leaf(a, dtype=cast, is_viewed=False)
                    rebuilt, _ = rebuild(block, index, b, x, a, used, cast, sums, lost, compiled)
                a, b = before_rearrange(block, shapes, rebuilt.detach(), a)
                reshard(block.sharded, (b,))
                wrong = map(relative_error, given, (a, b))
                errors.append((block.name, max(wrong)))
        return result, errors[::-1]

    def _sums(
        self,
        a: Tensor,
        b: Tensor,
        cast: torch.dtype | None,
        training: bool = True,
        exact: bool = True,
    ) -> Added:
        """How the couplings of one run combine their streams."""
        if not self.averaged:
            return Added(grid_for(a, b, cast, self._convolves) if training else None)
        dims = tuple(block.batch_dim for block in self.blocks)
        if not training or (len(dims) == 1 and a is b):  # one block alone keeps its input anyway
            return Averaged(None, dims)
        samples = b.shape[dims[0] or 0] if b.ndim > (dims[0] or 0) else 1
        # One draw before the first block: branches that draw for themselves are replayed from the
        # state of the generator, and nothing may be drawn between them.
        signs = random_signs((len(self.blocks), samples), b.device, b.dtype)
        if not exact:
            return Averaged(signs, dims)
        return FixedAverage(signs, dims)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply(call: _Call, a: Tensor, b: Tensor, sides: Sequence[Any]) -> tuple[Tensor, ...]:
    extras: tuple[Tensor, ...] = ()
    is_checked = call.chain.check.is_on and not is_capturing(a.device)
    with without_autocast_cache():  # each weight is read once
        for index, block in enumerate(call.chain.blocks):
            tensors = [sides[i] for i in block.sides if isinstance(sides[i], Tensor)]
            if block.sharded:
                (b,) = unshard(block.sharded, (b,))
            bound = Bound(block.bindings)
            needs = bound.differentiable()
            keeps = call.memory.keeps(index)
            if (
                is_checked
                and not keeps
                and (needs or any(t.requires_grad for t in (a, b, *tensors)))
            ):
                # The rebuild ends here: blocks before this one have nothing to train, or graphs.
                call.checked, is_checked = index, False
            a, b, *extras = _apply_block(call, index, sides, bound, a, b, *tensors, *needs)
            if block.sharded:
                (b,) = reshard(block.sharded, (b,))
            call.memory.mark(index)
    return a, b, *extras


@dataclass(slots=True)
class _Call:
    """State that the blocks share in one run of a chain."""

    chain: Chain
    cast: torch.dtype | None
    sums: Added
    around: Surroundings
    memory: ChainMemory
    compiler: Compiler | None = None
    """What compiles the blocks; None if they run eagerly."""
    signs: tuple[Tensor, ...] = ()
    """+1 and -1, for compiled blocks."""
    overlaps: bool = False
    """Whether backward rebuilds the previous block while it differentiates a block."""
    checked: int = -1
    """The first block that is differentiated, if the reconstruction is checked."""
    samples: StartedCheck | None = None
    """Samples of that block's input, after rounding to the chain's grid or units."""
    handed: _Handed | None = None
    """In backward: what the latest block passes to the previous one."""


def _compiler_for(
    compiler: Compiler | None, stream: Tensor
) -> tuple[Compiler | None, tuple[Tensor, ...]]:
    """The compiler if compiled functions can run here and now, and +1 and -1 for them."""
    if compiler is None or type(stream) is not Tensor or is_transformed():
        return None, ()
    if _has_any_global_hook() or not may_compile():
        return None, ()
    plus = torch.ones((), dtype=stream.dtype, device=stream.device)
    return compiler, (plus, -plus)


def _note(
    compiler: Compiler | None, block: Block, compiled: Compiled | None, error: Exception
) -> None:
    """Note that a block cannot be compiled; raises the error if it was not compiled."""
    if compiler is None or compiled is None:
        raise error
    compiler.failed(block.step.function, error)


@dataclass(slots=True)
class _Rebuilt:
    """A block computed again: its input, and the graph of its branch. Or a graph that was kept."""

    a: Tensor | None
    """None with a kept graph: the block before has its own output."""
    b: Tensor
    x: Tensor
    """`b` as the beginning of the graph, in the dtype in which F reads it."""
    sides: list[Tensor]
    """The block's side tensors in the graph."""
    parameters: Sequence[Tensor]
    """The parameters that require a gradient, as they are in the graph."""
    results: tuple[Tensor, ...]
    """F(b), or the sum of a compiled step, and the extras."""
    stream: int = 0
    """The number of the CUDA stream on which it was rebuilt (`TwoStreams`)."""


@dataclass(slots=True)
class _Handed:
    """What the backward pass of a block passes to that of the previous block.

    Autograd carries the gradients. It cannot carry the rebuilt streams.
    """

    index: int
    """The index of the previous block, which receives this."""
    output: _Output | None = None
    """The block's output; None if the block is rebuilt already."""
    rebuilt: _Rebuilt | None = None
    """With overlap: the block, already rebuilt."""
    gradients: tuple[Tensor, ...] = ()
    """The gradients returned to autograd, which nothing else needs: they may be overwritten."""


_Output = tuple[Tensor, Tensor]
"""A block's output `(b, y)`."""
_REST: Final = 6
"""Position of `rest` among the arguments of `_Reversible.forward`, without the context."""


class _Reversible(torch.autograd.Function):
    """One block. The last of a run of rebuilt blocks saves its output; others get it from the next.

    A block that keeps its graph differentiates that one in place of a rebuilt one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        index: int,
        sides: Sequence[Any],
        bound: Bound,
        a: Tensor,
        b: Tensor,
        *rest: Tensor,
    ) -> Any:
        block = call.chain.blocks[index]
        # Autograd returns `b` of the block before as a view, with other strides for sizes of 1.
        a, b = alike(a, b) if index else call.sums.enter(a, b)
        if index == call.checked:
            call.samples = call.chain.check.start({"a": samples_of(a), "b": samples_of(b)})
        used = [sides[i] for i in block.sides]
        a, b, ctx.shapes = arranged(block, a, b, sides)
        compiled, keeps = None, any(ctx.needs_input_grad) and call.memory.keeps(index)
        if not bound.hooks:
            compiled = compiled_block(block, call.compiler, call.signs, a, b, used)
        others = bound.stand_ins() if keeps else {}
        given = bound, a, b, used, others
        try:
            replay, results = _first_run(call, index, *given, compiled, keeps)
        except CANNOT_COMPILE as error:
            _note(call.compiler, block, compiled, error)
            call.around.random, compiled = None, None  # what it drew is drawn again
            replay, results = _first_run(call, index, *given, None, keeps)
        y, extras, ctx.addend_dtype, lost, graph = results
        ctx.compiled = compiled
        ctx.call, ctx.index, ctx.bound, ctx.replay = call, index, bound, replay
        ctx.plain_sides = [None if isinstance(side, Tensor) else (side,) for side in used]
        count = ctx.plain_sides.count(None)
        ctx.parameters = rest[count:]
        if not any(ctx.needs_input_grad):
            lost = ()
        is_last = block is call.chain.blocks[-1] or call.memory.keeps(index + 1)
        kept = (b, y) if is_last and graph is None else ()
        ctx.kept, ctx.lost, ctx.strides = len(kept), len(lost), b.stride()
        ctx.graph = None
        if graph is None:
            ctx.save_for_backward(*kept, *lost, *rest[:count])
        else:
            sides = [side for side in graph.sides if isinstance(side, Tensor)]
            trained = _in_graph(ctx.parameters, others)
            ctx.graph = _Rebuilt(None, b, graph.x, sides, trained, graph.results)
        return b, y, *extras

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_b: Tensor, grad_y: Tensor, *grad_extras: Tensor) -> Any:
        call: _Call = ctx.call
        handed, call.handed = call.handed, None
        saved: Sequence[Tensor] = ()
        call.memory.begin_backward(ctx.index)
        if ctx.graph is not None:
            if handed is None or handed.index != ctx.index:
                handed = _Handed(ctx.index)
            handed.rebuilt = ctx.graph
            if not _keeps_graph():
                ctx.graph = None
            ctx.bound.check(call.chain.blocks[ctx.index].name)
            call.chain.check_repeatable()
        elif ctx.kept:  # the last block of its run
            saved = ctx.saved_tensors  # once: `torch.utils.checkpoint` gives them only once
            ctx.outputs = saved[: ctx.kept]
            grad_b, grad_y = laid_out_like(saved[0], grad_b), laid_out_like(saved[1], grad_y)
            # Hooks on saved tensors may return others.
            b, y = (with_strides(stream, ctx.strides) for stream in saved[:2])
            handed = _Handed(ctx.index, output=(b, y))
            saved = saved[ctx.kept :]
            call.chain.check_repeatable()
        elif handed is None or handed.index != ctx.index:
            raise InputError(
                f"{call.chain.name} is differentiated in parts, but rebuilds its values once, from "
                "the last block to the first; differentiate it in one backward pass, or store "
                "activations (net.reversible = False, or to_pipeline_stages(reversible=False))"
            )
        elif handed.rebuilt is None:
            saved = ctx.saved_tensors
        is_kept = handed.rebuilt is not None and handed.rebuilt.a is None
        rebuilt = handed.rebuilt or _rebuild(ctx, saved, handed.output)
        handed.output = handed.rebuilt = ahead = None
        del saved
        with TwoStreams(grad_y.device, call.overlaps) as streams:
            previous = None if is_kept else _previous_block(ctx)
            if call.overlaps and previous is not None:
                other = 1 - rebuilt.stream
                with streams.on(other):
                    output = _input_of(ctx, rebuilt)
                    ahead = _rebuild(previous, previous.saved_tensors, output, other)
            again = nullcontext() if ctx.graph is None else retaining()  # a kept graph
            with streams.backward_on(rebuilt.stream), again:
                results = _differentiate(ctx, rebuilt, handed, grad_b, grad_y, *grad_extras)
        call.memory.mark(ctx.index)
        if ctx.index == call.checked and call.samples is not None:
            a, b = _input_of(ctx, rebuilt)
            call.chain.check.finish(call.samples, {"a": samples_of(a), "b": samples_of(b)})
        if call.handed is not None:
            call.handed.rebuilt = ahead
            is_read = ahead is None and not is_kept and not call.memory.keeps(ctx.index - 1)
            call.handed.output = _input_of(ctx, rebuilt) if is_read else None
        return None, None, None, None, *results


def _first_run(
    call: _Call,
    index: int,
    bound: Bound,
    a: Tensor,
    b: Tensor,
    used: Sequence[Any],
    others: Mapping[int, Tensor],
    compiled: Compiled | None,
    keeps: bool,
) -> tuple[Replay, tuple[Tensor, tuple[Tensor, ...], torch.dtype, tuple[Tensor, ...], Any]]:
    """A block's sum in forward, and what repeats it."""
    block = call.chain.blocks[index]
    replay = Replay(block.replay_context, call.around, bool(bound.hooks))
    hooks = block.bindings.hooks.running(bound.hooks)
    with replay.record(), hooks, bound.replaced_by(others):
        given = block, index, a, b, used, call.cast, call.sums, compiled
        return replay, couple(*given, keeps=keeps)


# Skips the part of `apply` for `torch.func`, whose transforms never get here (`is_transformed`).
_apply_block: Final = super(torch.autograd.Function, _Reversible).apply


def _previous_block(node: Any) -> Any:
    """The autograd node of the previous block, if that is differentiated too."""
    previous = node.next_functions[0][0]
    if getattr(previous, "call", None) is not node.call or previous.index != node.index - 1:
        return None
    return None if previous.kept or previous.graph is not None else previous


def _before_rearrange(node: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    return before_rearrange(node.call.chain.blocks[node.index], node.shapes, *tensors)


def _input_of(node: Any, rebuilt: _Rebuilt) -> _Output:
    """The input of a rebuilt block: the output of the previous one."""
    assert rebuilt.a is not None
    b, y = _before_rearrange(node, rebuilt.a, rebuilt.b)
    return b, y


def _rebuild(
    node: Any, saved: Sequence[Tensor], output: _Output | None, stream: int = 0
) -> _Rebuilt:
    """Rebuild a block's input from its output (PETRA, Eq. 4), keeping the graph of F."""
    call: _Call = node.call
    bound: Bound = node.bound
    block = call.chain.blocks[node.index]
    bound.check(block.name)
    lost, tensors = tuple(saved[: node.lost]), saved[node.lost :]
    assert output is not None
    b, y = output
    needs = node.needs_input_grad[_REST:]
    sides = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=False)]
    next_side = iter(sides)
    used = [next(next_side) if plain is None else plain[0] for plain in node.plain_sides]
    others = bound.stand_ins()
    parameters = _in_graph(node.parameters, others)
    compiled: Compiled | None = node.compiled
    hooks = block.bindings.hooks.running(bound.hooks)
    with bound.restored(others), hooks, node.replay.again(compiled is not None):
        is_viewed = compiled is None and bool(bound.hooks or _has_any_global_hook())
        x = stream_leaf(b, dtype=call.cast, is_viewed=is_viewed)
        a, results = rebuild(
            *(block, node.index, y, x, b, used, call.cast, call.sums, lost, compiled)
        )
    call.memory.rebuilt(node.index, results, (a, b))
    return _Rebuilt(a, b, x, sides, parameters, results, stream)


def _in_graph(parameters: Sequence[Tensor], others: Mapping[int, Tensor]) -> Sequence[Tensor]:
    """The parameters as they are in the graph of a branch (`Bound.stand_ins`)."""
    if not others:
        return parameters
    return [others.get(id(p), p).requires_grad_() for p in parameters]


def _keeps_graph() -> bool:
    """Whether the backward pass that runs now was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _differentiate(
    node: Any,
    rebuilt: _Rebuilt,
    handed: _Handed,
    grad_b: Tensor,
    grad_y: Tensor,
    *grad_extras: Tensor,
) -> tuple[Tensor | None, ...]:
    """Differentiate F: the gradients of the block's streams, of its sides and of its parameters."""
    call: _Call = node.call
    block, known = call.chain.blocks[node.index], handed.gradients
    is_own = bool(known) and known[0] is grad_b and known[1] is grad_y and not call.overlaps
    of_a, own, of_addend = call.sums.gradients(
        node.index, grad_b, grad_y, node.addend_dtype, is_own
    )
    check: AbstractContextManager[None] = nullcontext()
    if not block.leaves_checked or node.bound.hooks:
        check = refusing_other_leaves(f"the reversible block {block.name}")
    with gradient_hooks_silenced(rebuilt.parameters), check:
        of_b, _, *others = branch_vjp(
            *(rebuilt.x, own, rebuilt.results, (of_addend, *grad_extras)),
            *(rebuilt.sides, rebuilt.parameters),
        )
    assert of_b is not None
    block.leaves_checked = True
    streams = _before_rearrange(node, of_a, of_b)
    if node.index:
        call.handed = _Handed(node.index - 1, gradients=streams)
    return *streams, *others
