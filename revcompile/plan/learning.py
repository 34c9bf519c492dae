"""What late gradients cost in learning, as far as it was measured.

Every figure is from docs/results.md, where it says how it was measured; delays between two measured
ones are described by the later.
"""

from __future__ import annotations

from typing import Final

from revcompile.ir.types import Rewired
from revcompile.runtime.trainer.advice import has_attention

_ATTENTION: Final = (
    (
        1,
        "a GPT in 8 stages reached a validation loss of 1.528 (backprop: 1.514 with AdamW, 1.534 "
        "with Muon), a ViT in 4 stages 73.67 % (backprop: 73.43 % with AdamW, 74.64 % with "
        "DelayAwareAdamW)",
    ),
    (
        2,
        "a ViT in 8 stages reached 65.45 % (backprop: 73.43 to 74.64 %; with weights='stashed' "
        "73.34 %)",
    ),
    (
        7,
        "a GPT in 8 stages reached a validation loss of 2.286 (backprop: 1.514; with "
        "weights='stashed' 1.669, and with policy='pretrained' too 1.561)",
    ),
)
_CONVOLUTIONS: Final = (
    (3, "ResNet-18 in 10 stages ended 0.05 to 0.10 points behind backprop, less than seeds differ"),
    (9, "ResNet-18 in 10 stages ended 0.31 points behind backprop"),
    (18, "ResNet-18 in 10 stages reached 91.64 % (backprop: 92.70 %), in the paper's order"),
)
"""By the largest delay, in updates: what was measured with optimizers that know the delay."""


def cost_of_delay(rewired: Rewired, delay: int) -> str:
    """What a delay of so many updates cost a model of this kind, in words."""
    if not delay:
        return "no gradient is late"
    late = "at most one update late" if delay == 1 else f"up to {delay} updates late"
    rows = _ATTENTION if has_attention(rewired.graphs, rewired.root) else _CONVOLUTIONS
    measured = next((text for most, text in rows if delay <= most), None)
    if measured is None:
        most, text = rows[-1]
        return f"{late}, more than was ever measured; with {most}, {text}"
    return f"{late}; measured: {measured}"
