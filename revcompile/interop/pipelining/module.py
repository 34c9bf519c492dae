"""One stage as a module that torch's schedules can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.ir.types import Body, Rewired
from revcompile.runtime.reversible.coupling import Chain
from revcompile.runtime.reversible.module import Reversible, _Step
from revcompile.runtime.reversible.reconstruction import Tolerance


class StageModule(Reversible):
    """One stage: `forward(*tensors)` returns the inputs of the next stage, differentiably.

    It takes the outputs of the previous stage (the first: the model's tensors in order). All but
    the last return a tuple; the last returns the model's output if that is one tensor, and
    otherwise its tensors in order.
    """

    def __init__(self, rewired: Rewired, tolerance: Tolerance, description: str) -> None:
        super().__init__(rewired, tolerance)
        self.__dict__["_description"] = description

    _description: str

    def forward(self, *tensors: Tensor) -> Any:
        """Run the stage on the outputs of the previous one."""
        if self.rewired.eval_body is not None and not self.training:
            raise InputError(
                f"{self.rewired.name}: the model returns something else in eval mode than in "
                "training, and stages are cut for training; evaluate net.module()"
            )
        outputs = super().forward(*map(_sendable, tensors))
        return tuple(map(_sendable, outputs)) if isinstance(outputs, tuple) else outputs

    def extra_repr(self) -> str:
        return self._description

    def _steps(self, body: Body) -> tuple[_Step, ...]:
        return tuple(map(_guarded, super()._steps(body)))


# -- tensors between stages -----------------------------------------------------------------------


class _Sendable(torch.autograd.Function):
    """The identity, as a contiguous tensor, and its gradient as one.

    Only contiguous tensors can be sent, which a stream that is half of a larger tensor is not, and
    torch's zero-bubble schedules detach a stage's outputs in place, which views forbid.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _sendable(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.requires_grad:
        return value.detach().contiguous()
    sent: Tensor = _Sendable.apply(value)
    return sent


# -- chains ---------------------------------------------------------------------------------------


class _OnceChain(Chain):
    """A chain that refuses to be differentiated in parts.

    A block gets its output from the next block, which has just rebuilt it. Zero-bubble schedules
    differentiate the weights later, block by block, when no output is left.
    """

    def reversible(
        self, a: Tensor, b: Tensor, sides: Sequence[Any], cast: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """The chain keeping only its output for the one backward pass."""
        outputs = super().reversible(a, b, sides, cast)
        node = outputs[0].grad_fn
        for _ in self.blocks:
            if node is None:
                break
            node.register_prehook(_Once())
            node = node.next_functions[0][0]
        return outputs


class _Once:
    """A hook that lets a node run once."""

    def __init__(self) -> None:
        self.ran = False

    def __call__(self, gradients: tuple[Tensor, ...]) -> None:
        if self.ran:
            raise InputError(
                "to_pipeline_stages: this schedule computes the gradients of inputs and weights "
                "in two passes, but a reversible stage rebuilds its values once; use "
                "to_pipeline_stages(reversible=False), or a schedule like Schedule1F1B"
            )
        self.ran = True


def _guarded(step: _Step) -> _Step:
    """The step, its chain guarded.

    Torch learns shapes by running a stage, forward and backward, on uninitialized memory: before
    the first step and again after every change between training and evaluation. So one call that
    cannot be rebuilt is no evidence, but two in a row are.
    """
    chain = step.run
    if not isinstance(chain, Chain):
        return step
    settings = chain.blocks, chain.tolerance, chain.check_every, chain.convolves, chain.overlap
    once = _OnceChain(*settings, 1, chain.averaged)
    return replace(step, run=once)
