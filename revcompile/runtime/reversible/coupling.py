"""The coupling and its chain: the mathematics everything else stands on.

    forward   (a, b) -> (b, a + F(b))                     PETRA, Fig. 2b
    inverse   (b, y) -> (y - F(b), b)                     PETRA, Fig. 2c

A chain keeps nothing but its output. Its backward walks from the last block to the first: it
reconstructs a block's input *keeping the graph of F*, and takes the gradient through that very
graph (4N work, not 5N). Each block is an autograd node of its own, so that a parameter's gradient
is accumulated (and, under DDP, sent) as soon as it is there, instead of all waiting for the chain's
first block. Randomness, autocast and buffers are replayed as they were (`replay`).

With `overlap` the block before is rebuilt ahead, while a block is differentiated: that needs the
reconstructed input, not its gradient.

Where branches compute in low precision, addends are rounded to a grid on which float32 sums are
exact, and so is the reconstruction (`grid`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from revcompile.ir.ops import as_read
from revcompile.ir.stage_ops import laid_out_like
from revcompile.kernels.exact_sum import is_imprecise, make_grid, rounded, sum_up
from revcompile.kernels.gradient_sum import GradientSum
from revcompile.runtime.reversible.bindings import Bound
from revcompile.runtime.reversible.block import Block, couple, rearranged, run_branch, uncouple
from revcompile.runtime.reversible.hooks import gradient_hooks_silenced
from revcompile.runtime.reversible.overlap import Overlap, side_by_side
from revcompile.runtime.reversible.reconstruction import (
    ReconstructionCheck,
    Samples,
    Tolerance,
    relative_error,
)
from revcompile.runtime.reversible.replay import Replay, is_recorded
from revcompile.runtime.reversible.sharding import enter, leave
from revcompile.runtime.reversible.transforms import differentiable_once, is_transformed

__all__ = ["Block", "Chain", "couple", "uncouple"]


@dataclass
class Chain:
    """Couplings in a row, run as one differentiable function that stores no activations."""

    blocks: tuple[Block, ...]
    tolerance: Tolerance = None
    check_every: int = 50
    convolves: bool = False
    overlap: Overlap = Overlap.OFF
    failures_allowed: int = 0
    """Consecutive calls that may rebuild their input wrongly without an error."""
    check: ReconstructionCheck = field(init=False)

    def __post_init__(self) -> None:
        name = f"{self.blocks[0].name} .. {self.blocks[-1].name}"
        settings = self.tolerance, self.check_every, self.failures_allowed
        self.check = ReconstructionCheck(name, *settings)

    def grid(self, a: Tensor, b: Tensor, cast: torch.dtype | None) -> Tensor | None:
        """The grid for one run, where branches need one."""
        return make_grid(a, b) if is_imprecise(a, cast, self.convolves) else None

    def plain(
        self,
        root: nn.Module,
        a: Tensor,
        b: Tensor,
        sides: Sequence[Any],
        cast: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        """The chain as ordinary operations (eval mode, `no_grad`, and the reference in tests)."""
        grid = self.grid(a, b, cast) if root.training else None
        a, b = rounded(a, grid), rounded(b, grid)
        extras: tuple[Tensor, ...] = ()
        for block in self.blocks:
            (b,) = enter(block.units, (b,))
            a, b, _, extras = couple(root, block, a, b, sides, cast, grid)
            (b,) = leave(block.units, (b,))
        return a, b, *extras

    def reversible(
        self,
        root: nn.Module,
        a: Tensor,
        b: Tensor,
        sides: Sequence[Any],
        cast: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        """The chain keeping only its output for the backward pass.

        `torch.func` and forward-mode AD differentiate operations, not our backward: for those the
        chain is plain.
        """
        if is_transformed():
            return self.plain(root, a, b, sides, cast)
        # A block that is rebuilt ahead would find its weights sharded.
        ahead = self.overlap.applies_to(a) and not any(block.units for block in self.blocks)
        call = _Call(self, root, cast, self.grid(a, b, cast), ahead)
        out: tuple[Tensor, ...] = _apply(call, a, b, sides)
        return out

    def inspect(
        self,
        root: nn.Module,
        a: Tensor,
        b: Tensor,
        sides: Sequence[Any],
        cast: torch.dtype | None = None,
    ) -> tuple[tuple[Tensor, ...], list[tuple[str, float]]]:
        """Run forward and back; returns the outputs and each block's reconstruction error."""
        states, replays, shapes_of = [], [], []
        extras: tuple[Tensor, ...] = ()
        grid = self.grid(a, b, cast)
        with torch.no_grad():
            a, b = rounded(a, grid), rounded(b, grid)
            for block in self.blocks:
                replay = Replay(block.replay_context, a)
                states.append((a, b))
                enter(block.units, (b,))
                a, b, shapes, extras = couple(root, block, a, b, sides, cast, grid)
                leave(block.units, (b,))
                replays.append(replay.settle())
                shapes_of.append(shapes)
            x, y, errors = a, b, []
            for block, replay, shapes, (a0, b0) in zip(
                *map(reversed, (self.blocks, replays, shapes_of, states)), strict=True
            ):
                enter(block.units, (y,))
                with replay.replay():
                    x, y = uncouple(root, block, x, y, sides, shapes, cast, grid)
                leave(block.units, (y,))
                errors.append((block.name, max(relative_error(a0, x), relative_error(b0, y))))
        return (a, b, *extras), list(reversed(errors))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply(call: _Call, a: Tensor, b: Tensor, sides: Sequence[Any]) -> tuple[Tensor, ...]:
    extras: tuple[Tensor, ...] = ()
    check = call.chain.check
    is_checked = check.is_on and not is_recorded(a.device)
    for index, block in enumerate(call.chain.blocks):
        tensors = [sides[i] for i in block.sides if isinstance(sides[i], Tensor)]
        (b,) = enter(block.units, (b,))
        bound = Bound(block.bindings)
        parameters = bound.differentiable()
        if is_checked and (parameters or any(t.requires_grad for t in (a, b, *tensors))):
            # Autograd stops here on its way back: blocks before this one have nothing to train.
            call.first, call.samples = index, check.start(a, b)
            is_checked = False
        a, b, *extras = _Reversible.apply(call, index, sides, bound, a, b, *tensors, *parameters)
        (b,) = leave(block.units, (b,))
    return a, b, *extras


@dataclass
class _Call:
    """What the blocks of one run of a chain share: no activations."""

    chain: Chain
    root: nn.Module
    cast: torch.dtype | None
    grid: Tensor | None
    ahead: bool = False
    """In backward: is the block before rebuilt while a block is differentiated?"""
    first: int = 0
    """The first block that is differentiated."""
    samples: tuple[bool, Samples] | None = None
    """Of what that block was given, if the reconstruction is checked."""
    copy: Tensor | None = None
    """In forward: the latest sum as the next branch reads it, if that is there."""
    handed_on: _Output | None = None
    """In backward: a block's input as reconstructed, which is the output of the block before."""
    rebuilt: _Rebuilt | None = None
    """In backward: the block before, rebuilt ahead."""
    seed: tuple[Tensor, Tensor] | None = None
    """In backward: a gradient, and the same in the type of the branch that it goes into next."""

    def is_read_cast(self, index: int, way: int) -> bool:
        """Does the branch one block on, or back, read a block's sum as autocast casts it?"""
        blocks, next_to = self.chain.blocks, index + way
        if self.cast is not None or not 0 <= next_to < len(blocks):
            return False
        return blocks[next_to].casts_on_read and blocks[max(index, next_to)].rearrange is None


_Output = tuple[Tensor, Tensor, Tensor | None]
"""A block's output `(b, y)`; `b` also as the block's branch reads it, if that is there."""


@dataclass
class _Rebuilt:
    """A block computed again: the input it was given, and the graph of its branch."""

    index: int
    a: Tensor
    b: Tensor
    leaf: Tensor
    gradient: GradientSum
    """Of `b`: its own, and what comes through the branch."""
    live: list[Tensor]
    """The block's side tensors, as the graph knows them."""
    parameters: list[Tensor]
    """Those that want a gradient, as the graph knows them."""
    ends: tuple[Tensor, ...]
    copy: Tensor | None
    """`a` as the block before reads it, if that is there."""
    lane: int = 0


class _Reversible(torch.autograd.Function):
    """One block. Only the chain's last block keeps its output; the others get it handed on."""

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
        if index == 0:
            a, b = rounded(a, call.grid), rounded(b, call.grid)
        replay = Replay(block.replay_context, a)
        used = [sides[i] for i in block.sides]
        with replay.record(), bound.running():
            a, b, ctx.shapes = rearranged(call.root, block, a, b, sides)
            read, call.copy = b if call.copy is None else call.copy, None
            addend, extras = run_branch(call.root, block, read, used, call.cast)
            y, call.copy = sum_up(a, addend, call.grid, False, call.is_read_cast(index, 1))
        ctx.call, ctx.index, ctx.bound, ctx.replay = call, index, bound, replay.settle()
        ctx.addend_type = addend.dtype
        count = sum(isinstance(side, Tensor) for side in used)
        ctx.plain_sides = [None if isinstance(side, Tensor) else (side,) for side in used]
        ctx.parameters = rest[count:]
        outputs = (b, y) if block is call.chain.blocks[-1] else ()
        ctx.save_for_backward(*outputs, *rest[:count])
        return b, y, *extras

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_b: Tensor, grad_y: Tensor, *grad_extras: Tensor) -> Any:
        call: _Call = ctx.call
        rebuilt, call.rebuilt = call.rebuilt, None
        if rebuilt is None or rebuilt.index != ctx.index:
            saved = ctx.saved_tensors  # once: `torch.utils.checkpoint` gives them only once
            if ctx.index == len(call.chain.blocks) - 1:
                ctx.outputs = saved[:2]
                grad_b, grad_y = laid_out_like(saved[0], grad_b), laid_out_like(saved[1], grad_y)
            rebuilt = _rebuild(ctx, saved, call.handed_on)
        call.handed_on = None
        seed, call.seed = call.seed, None
        seeds = seed[1] if seed and seed[0] is grad_y else grad_y, *grad_extras
        with side_by_side(grad_y.device, call.ahead) as lanes:
            earlier = _block_before(ctx) if call.ahead else None
            if earlier is not None:
                with lanes.on(1 - rebuilt.lane):
                    output = _handed_on(ctx, rebuilt)
                    saved = earlier.saved_tensors
                    call.rebuilt = _rebuild(earlier, saved, output, 1 - rebuilt.lane)
            with lanes.differentiating(rebuilt.lane):
                grad_b, copy, found = _differentiate(ctx, rebuilt, grad_b, seeds)
                grads = _before_link(ctx, grad_y, grad_b)
                if copy is not None:
                    call.seed = grads[1], _before_link(ctx, copy)[0]
        if ctx.index == call.first and call.samples is not None:
            call.chain.check.finish(call.samples, *_before_link(ctx, rebuilt.a, rebuilt.b))
        if ctx.index > 0 and earlier is None:
            call.handed_on = _handed_on(ctx, rebuilt)
        return None, None, None, None, *grads, *found


def _block_before(node: Any) -> Any:
    """The node of the block before, if gradients are wanted that far."""
    found = node.next_functions[0][0]
    return found if getattr(found, "call", None) is node.call else None


def _before_link(node: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Values, or gradients of them, as they were before a block's rearrange.

    A rearrange permutes elements, so a gradient goes back the way the values do.
    """
    unlink = node.call.chain.blocks[node.index].unlink
    if unlink is None:
        return tensors
    return tuple(unlink(node.call.root, tensor, node.shapes) for tensor in tensors)


def _handed_on(node: Any, rebuilt: _Rebuilt) -> _Output:
    """A rebuilt block's input, for the block before."""
    b, y = _before_link(node, rebuilt.a, rebuilt.b)
    return b, y, rebuilt.copy


def _rebuild(node: Any, saved: Sequence[Tensor], output: _Output | None, lane: int = 0) -> _Rebuilt:
    """Reconstruct a block's input (PETRA, Eq. 4) keeping the graph of F.

    The chain's last block has its output itself.
    """
    call: _Call = node.call
    bound: Bound = node.bound
    block = call.chain.blocks[node.index]
    bound.check(block.name)
    tensors = list(saved)
    if block is call.chain.blocks[-1]:
        output, tensors = (tensors[0], tensors[1], None), tensors[2:]
    assert output is not None
    b, y, read = output
    needs = node.needs_input_grad[6:]
    live = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=False)]
    sides = iter(live)
    used = [next(sides) if plain is None else plain[0] for plain in node.plain_sides]
    stand_ins = bound.stand_ins()
    parameters = [stand_ins.get(id(p), p) for p in node.parameters]
    with torch.enable_grad(), bound.repeated(stand_ins), node.replay.replay():
        leaf = _as_read((b if read is None else read).detach(), block, call.cast).requires_grad_()
        gradient = GradientSum()
        # Module hooks (torch's FlopCounterMode, for one) cannot watch a leaf in `autograd.grad`.
        watched = gradient.awaits(leaf.view_as(leaf))
        addend, extras = run_branch(call.root, block, watched, used, call.cast)
        with torch.no_grad():
            a, copy = sum_up(y, addend.detach(), call.grid, True, call.is_read_cast(node.index, -1))
    ends = addend, *extras
    return _Rebuilt(node.index, a, b, leaf, gradient, live, parameters, ends, copy, lane)


def _as_read(b: Tensor, block: Block, cast: torch.dtype | None) -> Tensor:
    """`b` in the precision F reads it in.

    Its gradient then comes in that precision and is widened on being added, not before.
    """
    if cast is None:
        return as_read(b) if block.casts_on_read else b
    return b.to(cast) if b.dtype == torch.float32 else b


def _differentiate(
    node: Any, rebuilt: _Rebuilt, grad_b: Tensor, grads: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of `b`, of sides and of parameters, through the graph of F.

    That of `b` comes in the type of the branch before, too, if that is there.
    """
    wanted = [*(t for t in rebuilt.live if t.requires_grad), *rebuilt.parameters]
    seeds = zip(rebuilt.ends, grads, strict=True)
    seeded = [(out, seed.to(out.dtype)) for out, seed in seeds if out.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    copy: Tensor | None = None
    if seeded:
        ends, starts = zip(*seeded, strict=True)
        inputs = [rebuilt.leaf, *wanted]
        of_seed = getattr(_block_before(node), "addend_type", None)
        rebuilt.gradient.begin(grad_b, of_seed)
        with gradient_hooks_silenced(rebuilt.parameters):
            of_b, *found = torch.autograd.grad(ends, inputs, starts, allow_unused=True)
        grad_b, copy = rebuilt.gradient.finish(of_b)
    each = iter(found)
    of_sides = [next(each) if t.requires_grad else None for t in rebuilt.live]
    return grad_b, copy, [*of_sides, *each]
