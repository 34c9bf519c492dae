"""Buffers that a forward pass moves: averages, counters, norms of every mode."""

from typing import Final

from tests.fuzz.net import part
from tests.fuzz.writer import Writer

UPDATES: Final = (
    *("{b} = 0.9 * {b} + 0.1 * {v}", "{b}.mul_(0.9).add_({v})", "{b}.copy_({v})"),
    *("{b}.lerp_({v}, 0.1)", "{b} += {v}", "{b}[:] = {v}", "{b}.data = 0.9 * {b}.data + {v}"),
)


@part(
    "state",
    update=UPDATES,
    under=("detach", "no_grad", "training"),
    read=("none", "before", "after"),
    place=("before", "inside", "behind"),
)
def average(w: Writer, update: str, under: str, read: str, place: str) -> None:
    """A running mean of the activation or of a branch."""
    buffer = w.buffer("ema", f"torch.zeros({w.width})")
    layer = w.layer()
    mean = "h.mean((0, 2, 3))" if w.images else "h.mean((0, 1))" if w.sequence else "h.mean(0)"
    shaped = f"{buffer}.view(-1, 1, 1)" if w.images else buffer
    source = mean.replace("h.", "f.", 1) if place == "inside" else mean
    change = update.format(b=buffer, v=f"{source}.detach()")
    lines = [change]
    if under == "no_grad":
        lines = ["with torch.no_grad():", f"    {change}"]
    elif under == "training":
        lines = ["if self.training:", f"    {change}"]
    if place == "before":
        w.line(*lines)
    w.line(f"f = torch.tanh({layer}(h))")
    if read == "before":
        w.line(f"f = f - {shaped}.clone()")
    if place == "inside":
        w.line(*lines)
    if read == "after":
        w.line(f"f = f * (1 + {shaped})")
    w.line("h = h + f")
    if place == "behind":
        w.line(*lines)


@part("state", change=("{b} += 1", "{b}.add_(1)", "{b} = {b} + 1"), read=(False, True))
def counter(w: Writer, change: str, read: bool) -> None:
    """A counter of calls, and a branch that may depend on it."""
    buffer = w.buffer("count", "torch.tensor(0)")
    w.line(change.format(b=buffer))
    factor = f" / {buffer}" if read else ""
    w.line(f"h = h + torch.tanh({w.layer()}(h)){factor}")


@part("state", layouts=("rows", "images"), momentum=("0.1", "None"), place=("branch", "stream"))
def batch_norm(w: Writer, momentum: str, place: str) -> None:
    """A batch norm with its own momentum, in a branch or on the stream itself."""
    text = w.norm_text("batch").replace(")", f", momentum={momentum})")
    norm, layer = w.member("norm", text), w.layer()
    if place == "stream":
        w.line(f"h = {norm}(h)", f"h = h + torch.tanh({layer}(h))")
    else:
        w.line(f"h = h + torch.tanh({norm}({layer}(h)))")


@part("state", layouts=("rows", "images"), how=("eval", "no gradient", "no statistics"))
def frozen_norm(w: Writer, how: str) -> None:
    """A batch norm that does not learn."""
    norm, layer = w.norm("batch"), w.layer()
    if how == "eval":
        w.init(f"{norm}.eval()")
    elif how == "no gradient":
        w.init(f"{norm}.requires_grad_(False)")
    else:
        w.scope.init[-2] = w.scope.init[-2].replace(")", ", track_running_stats=False)")
    w.line(f"h = h + torch.tanh({norm}({layer}(h)))")


@part("state", what=("queue", "statistic", "int"))
def recorded(w: Writer, what: str) -> None:
    """Something that is only written down: a queue, a statistic of the gate."""
    layer = w.layer()
    if what == "queue":
        queue = w.buffer("queue", f"torch.zeros(4, {w.width})")
        place = w.buffer("place", "torch.zeros((), dtype=torch.long)")
        w.line(f"u = {w.pooled()}.detach()")
        w.line(f"{queue} = torch.cat([{queue}[1:], u[:1]])", f"{place}.add_(1).remainder_(7)")
    elif what == "statistic":
        largest = w.buffer("largest", "torch.zeros(())")
        w.line(f"{largest} = torch.maximum({largest}, h.detach().abs().max())")
    else:
        seen = w.buffer("seen", "torch.zeros((), dtype=torch.long)")
        w.line(f"{seen} += h.shape[0]")
    w.line(f"h = h + torch.tanh({layer}(h))")
