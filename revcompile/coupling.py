"""The coupling and its chain: the mathematics everything else stands on.

    forward   (a, b) -> (b, a + F(b))                     PETRA, Fig. 2b
    inverse   (b, y) -> (y - F(b), b)                     PETRA, Fig. 2c

A chain keeps nothing but its output. Its backward walks from the last block to the first: it
reconstructs a block's input *keeping the graph of F*, and takes the gradient through that very
graph (4N work, not 5N). Randomness, autocast and buffers are replayed as they were (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from revcompile.errors import InversionError
from revcompile.replay import Circumstances, Replay

__all__ = ["Block", "Chain", "couple", "uncouple"]


@dataclass(frozen=True)
class Block:
    """An executable coupling.

    `branch(root, b, *sides)` is F. `sides` are the positions of the block's side values among
    the chain's. With `has_extras` it returns `(F(b), *extras)`: values read outside the block,
    which end a chain. `link(root, stream, *sizes) -> (stream, shapes)` and
    `unlink(root, stream, shapes)` rearrange a stream, where needed.
    """

    name: str
    branch: Callable[..., Any]
    sides: tuple[int, ...] = ()
    has_extras: bool = False
    link: Callable[..., tuple[Tensor, Any]] | None = None
    unlink: Callable[..., Tensor] | None = None
    link_sides: tuple[int, ...] = ()
    parameters: tuple[nn.Parameter, ...] = ()
    circumstances: Circumstances = field(default_factory=Circumstances)


def couple(
    root: nn.Module,
    block: Block,
    a: Tensor,
    b: Tensor,
    sides: Sequence[Any],
    cast: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Any, tuple[Tensor, ...]]:
    """`(a, b) -> (b, a + F(b))`, after the block's link.

    Also returns the shapes to unlink, and the block's extras.
    """
    shapes: Any = ()
    if block.link is not None:
        sizes = [sides[i] for i in block.link_sides]
        a, shapes = block.link(root, a, *sizes)
        b, _ = block.link(root, b, *sizes)
    addend, extras = run_branch(root, block, b, sides, cast)
    return b, a + addend, shapes, extras


def run_branch(
    root: nn.Module, block: Block, b: Tensor, sides: Sequence[Any], cast: torch.dtype | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """F(b) and the extras. Streams wider than the model's own type are cast on the way in."""
    b = b if cast is None else b.to(cast)
    found = block.branch(root, b, *(sides[i] for i in block.sides))
    return (found[0], tuple(found[1:])) if block.has_extras else (found, ())


def uncouple(
    root: nn.Module,
    block: Block,
    b: Tensor,
    y: Tensor,
    sides: Sequence[Any],
    shapes: Any,
    cast: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`(b, y) -> (y - F(b), b)`, then back through the block's link."""
    a = y - run_branch(root, block, b, sides, cast)[0]
    if block.unlink is not None:
        a, b = block.unlink(root, a, shapes), block.unlink(root, b, shapes)
    return a, b


@dataclass
class Chain:
    """Couplings in a row, run as one differentiable function that stores no activations."""

    blocks: tuple[Block, ...]
    tolerance: float | None = None
    check_every: int = 50
    _calls: int = 0

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All parameters of the chain's branches, each once."""
        return tuple(dict.fromkeys(p for block in self.blocks for p in block.parameters))

    def plain(
        self,
        root: nn.Module,
        a: Tensor,
        b: Tensor,
        sides: Sequence[Any],
        cast: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        """The chain as ordinary operations (eval mode, `no_grad`, and the reference in tests)."""
        extras: tuple[Tensor, ...] = ()
        for block in self.blocks:
            a, b, _, extras = couple(root, block, a, b, sides, cast)
        return a, b, *extras

    def reversible(
        self,
        root: nn.Module,
        a: Tensor,
        b: Tensor,
        sides: Sequence[Any],
        cast: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        """The chain keeping only its output for the backward pass."""
        parameters = tuple(p for p in self.parameters if p.requires_grad)
        tensors = [s for s in sides if isinstance(s, Tensor)]
        layout = [isinstance(s, Tensor) for s in sides]
        rest = [s for s in sides if not isinstance(s, Tensor)]
        out: tuple[Tensor, ...] = _apply(
            _Call(self, root, layout, rest, parameters, cast), a, b, tensors
        )
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
        with torch.no_grad():
            for block in self.blocks:
                replay = Replay(block.circumstances, a)
                states.append((a, b))
                a, b, shapes, extras = couple(root, block, a, b, sides, cast)
                replays.append(replay.settle())
                shapes_of.append(shapes)
            x, y, errors = a, b, []
            for block, replay, shapes, (a0, b0) in zip(
                *map(reversed, (self.blocks, replays, shapes_of, states)), strict=True
            ):
                with replay.playing():
                    x, y = uncouple(root, block, x, y, sides, shapes, cast)
                errors.append((block.name, max(relative_error(a0, x), relative_error(b0, y))))
        return (a, b, *extras), list(reversed(errors))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply(call: _Call, a: Tensor, b: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = _Reversible.apply(call, a, b, *tensors, *call.parameters)
    return out


@dataclass
class _Call:
    """What one run of a chain remembers besides its output: no activations."""

    chain: Chain
    root: nn.Module
    layout: list[bool]
    rest: list[Any]
    parameters: tuple[nn.Parameter, ...]
    cast: torch.dtype | None
    replays: list[Replay] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)
    probe: tuple[Tensor, Tensor] | None = None

    def sides(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Side values in order: tensors and plain ones woven together again."""
        of_tensors, of_rest = iter(tensors), iter(self.rest)
        return [next(of_tensors) if tensor else next(of_rest) for tensor in self.layout]


class _Reversible(torch.autograd.Function):
    """Forward: run the chain, keep the output. Backward: reconstruct and differentiate."""

    @staticmethod
    def forward(ctx: Any, call: _Call, a: Tensor, b: Tensor, *rest: Tensor) -> Any:
        tensors = rest[: sum(call.layout)]
        sides = call.sides(tensors)
        chain = call.chain
        if chain.tolerance is not None and chain._calls % chain.check_every == 0:
            call.probe = (_probe(a), _probe(b))
        chain._calls += 1
        extras: tuple[Tensor, ...] = ()
        for block in chain.blocks:
            replay = Replay(block.circumstances, a)
            a, b, shapes, extras = couple(call.root, block, a, b, sides, call.cast)
            call.replays.append(replay.settle())
            call.shapes.append(shapes)
        ctx.call = call
        ctx.save_for_backward(a, b, *tensors)
        return a, b, *extras

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_a: Tensor, grad_b: Tensor, *grad_extras: Tensor) -> Any:
        call: _Call = ctx.call
        b, y, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        of_sides: list[Tensor | None] = [None] * len(tensors)
        of_parameters: dict[Tensor, Tensor] = {}
        chain = call.chain
        for block, replay, shapes in zip(
            *map(reversed, (chain.blocks, call.replays, call.shapes)), strict=True
        ):
            live = [
                t.detach().requires_grad_(need) if need else t
                for t, need in zip(tensors, needs, strict=False)
            ]
            b, y, grad_a, grad_b = _step_back(
                call,
                block,
                replay,
                shapes,
                (b, y),
                (grad_a, grad_b, *grad_extras),
                live,
                of_sides,
                of_parameters,
            )
            grad_extras = ()
        if call.probe is not None:
            _compare_probe(chain, call.probe, b, y)
        gradients = [of_parameters.get(p) for p in call.parameters]
        return None, grad_a, grad_b, *of_sides, *gradients


def _step_back(
    call: _Call,
    block: Block,
    replay: Replay,
    shapes: Any,
    outputs: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, ...],
    live: list[Tensor],
    of_sides: list[Tensor | None],
    of_parameters: dict[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reconstruct one block's input and its gradients (PETRA, Eq. 4) with one graph of F."""
    b, y = outputs
    grad_b, grad_y, *grad_extras = gradients
    sides = call.sides(live)
    used = [sides[i] for i in block.sides]
    with torch.enable_grad(), replay.playing():
        b = b.detach().requires_grad_()
        addend, extras = run_branch(call.root, block, b, sides, call.cast)
    a = y - addend.detach()
    wanted = [b]
    wanted += [t for t in dict.fromkeys(used) if isinstance(t, Tensor) and t.requires_grad]
    wanted += [p for p in block.parameters if p.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    seeds = zip((addend, *extras), (grad_y, *grad_extras), strict=True)
    seeded = [(out, seed.to(out.dtype)) for out, seed in seeds if out.requires_grad]
    if seeded:
        ends, starts = zip(*seeded, strict=True)
        found = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
    position = {id(t): i for i, t in enumerate(live)}
    for tensor, gradient in zip(wanted[1:], found[1:], strict=True):
        if gradient is None:
            continue
        index = position.get(id(tensor))
        if index is not None:
            of_sides[index] = _plus(of_sides[index], gradient)
        else:
            of_parameters[tensor] = _plus(of_parameters.get(tensor), gradient)
    b = b.detach()
    grad_a = grad_y
    if found[0] is not None:
        grad_b = grad_b + found[0]
    if block.unlink is None:
        return a, b, grad_a, grad_b
    # A link permutes elements, so the gradient goes back the way the values do.
    back = [block.unlink(call.root, t, shapes) for t in (a, b, grad_a, grad_b)]
    return back[0], back[1], back[2], back[3]


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Largest deviation relative to the largest value."""
    if not expected.numel():
        return 0.0
    difference = (expected.double() - actual.double()).abs().max()
    error = float(difference / expected.double().abs().max().clamp_min(1e-30))
    return error if error == error else float("inf")


def _probe(stream: Tensor) -> Tensor:
    """A few hundred evenly spaced elements of a stream."""
    flat = stream.detach().reshape(-1) if stream.is_contiguous() else stream.detach().flatten()
    return flat[:: max(1, flat.numel() // 256)].clone()


def _compare_probe(chain: Chain, probe: tuple[Tensor, Tensor], a: Tensor, b: Tensor) -> None:
    error = max(relative_error(probe[0], _probe(a)), relative_error(probe[1], _probe(b)))
    assert chain.tolerance is not None
    if error > chain.tolerance:
        first, last = chain.blocks[0].name, chain.blocks[-1].name
        raise InversionError(
            f"the chain {first} .. {last} reconstructs its input only to {error:.1e} "
            f"(tolerance {chain.tolerance:.1e}), so its gradients would be wrong. "
            "revcompile.check_invertible(model, x) shows which block loses the precision; "
            "keep the streams in float32, lower the scale of that branch, or raise tolerance="
        )
