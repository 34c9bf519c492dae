"""Python that steers: sizes, attributes, flags, loops over a length, decisions by value."""

from typing import Final

from tests.fuzz.net import part
from tests.fuzz.writer import Writer

CONDITIONS: Final = (
    *("h.shape[0] > 5", "h.shape[{length}] > 6", "h.shape[{length}] % 2", "len(h) > 5"),
    *("h.size(0) * h.size({length}) > 36", "h.numel() > 140", "h.shape[0] % 2 == 0"),
    *("x.shape[0] > 5 and h.dim() > 1", "max(h.shape) > 6"),
)


@part("control", condition=CONDITIONS, form=("if", "expression", "else", "loop", "min"))
def by_size(w: Writer, condition: str, form: str) -> None:
    """A condition on the batch or on another size."""
    if "x." in condition:
        w.reads("x")
    text = condition.format(length=w.length)
    layer, other = w.layer(), w.layer()
    branch = f"h + torch.tanh({layer}(h))"
    if form == "if":
        w.line(f"if {text}:", "    h = 2 * h", f"h = {branch}")
    elif form == "expression":
        w.line(f"h = {branch} if {text} else h + torch.sin({other}(h))")
    elif form == "else":
        w.line(f"if {text}:", f"    h = {branch}", "else:", f"    h = h - torch.tanh({other}(h))")
    elif form == "loop":
        w.line(f"for _ in range(1 + int({text})):", f"    h = {branch}")
    else:
        w.line(
            f"k = min(h.shape[{w.length}], 6) + bool({text})", f"h = h + torch.tanh({layer}(h)) / k"
        )


@part("control", layouts=("tokens", "images"), how=("even", "window", "crop", "interpolate"))
def padded(w: Writer, how: str) -> None:
    """Padding to a multiple of a window and back."""
    layer = w.layer()
    w.line(f"t = h.shape[{w.length}]")
    edge = "(0, 0, 0, {})"
    if how == "even":
        w.line(
            "if t % 2:", f"    h = F.pad(h, {edge.format('1')})", f"h = h + torch.tanh({layer}(h))"
        )
    elif how == "window":
        w.line(f"h = F.pad(h, {edge.format('(4 - t % 4) % 4')})", f"h = h + torch.tanh({layer}(h))")
    elif how == "crop":
        w.line(f"u = F.pad(h, {edge.format('t % 2')})", f"f = torch.tanh({layer}(u))")
        w.line(f"h = h + f.narrow({w.length}, 0, t)")
    elif w.images:
        w.line(
            "f = F.interpolate(h, scale_factor=2.0)",
            f"f = F.adaptive_avg_pool2d({layer}(f), h.shape[2:])",
        )
        w.line("h = h + torch.tanh(f)")
    else:
        w.line("f = F.interpolate(h.transpose(1, 2), size=t // 2 + 1).transpose(1, 2)")
        w.line(f"h = h + torch.tanh({layer}(f)).mean(1, keepdim=True)")


@part(
    "control",
    layouts=("tokens", "words", "images"),
    how=("loop", "comprehension", "unbind", "while", "stack", "enumerate"),
)
def over_length(w: Writer, how: str) -> None:
    """A loop over time."""
    dim, layer = (
        w.length,
        w.layer(into=w.width)
        if not w.images
        else w.member("cell", f"nn.Conv1d({w.width}, {w.width}, 1)"),
    )
    at = f"h.select({dim}, i)"
    if how == "loop":
        w.line(f"s = torch.zeros_like(h.select({dim}, 0))", "steps = []")
        w.line(f"for i in range(h.shape[{dim}]):", f"    s = torch.tanh({layer}(s) + {at})")
        w.line("    steps.append(s)", f"h = h + torch.stack(steps, {dim})")
    elif how == "while":
        w.line("i = 0", "s = 0")
        w.line(f"while i < h.shape[{dim}]:", f"    s = s + torch.tanh({layer}({at}))", "    i += 2")
        w.line(f"h = h + s.unsqueeze({dim})")
    elif how == "enumerate":
        w.line("s = 0", f"for i, row in enumerate(h.unbind({dim})):")
        w.line(f"    s = s + torch.tanh({layer}(row)) * (i + 1)", f"h = h + s.unsqueeze({dim})")
    else:
        rows = f"h.unbind({dim})" if how == "unbind" else f"[{at} for i in range(h.shape[{dim}])]"
        w.line(f"f = torch.stack([torch.tanh({layer}(row)) for row in {rows}], {dim})", "h = h + f")


@part(
    "control", how=("flag", "alpha", "step", "mode", "training", "schedule"), change=(False, True)
)
def attribute(w: Writer, how: str, change: bool) -> None:
    """Python attributes that steer; `alpha` is what the oracle changes between calls."""
    layer = w.layer()
    if how == "flag":
        flag = w.member("flag", "True")
        w.line(f"if {flag}:", f"    h = h + torch.tanh({layer}(h))")
    elif how == "alpha":
        w.init("self.alpha = 0.5")
        w.line(f"h = h + self.alpha * torch.tanh({layer}(h))")
    elif how == "step":
        step = w.member("step", "0")
        w.line(f"{step} += 1", f"h = h + torch.tanh({layer}(h))")
        w.line(f"if {step} % 2:" if change else f"if {step} > 100:", "    h = 2 * h")
    elif how == "mode":
        mode = w.member("mode", '"tanh"')
        w.line(f"h = h + getattr(torch, {mode})({layer}(h))")
    elif how == "training":
        w.line("if self.training:", f"    h = h + torch.tanh({layer}(h))", "else:", "    h = h + 1")
    else:
        step = w.member("step", "0")
        w.line(f"h = h + torch.tanh({layer}(h)) * (1 + {step} / 10)")
        if change:
            w.line(f"{step} = {step} + 1")


DECISIONS: Final = ("argmax", "topk", "argsort", "route", "where", "ties", "round", "sign", "index")


@part("control", how=DECISIONS, tied=(False, True))
def decided(w: Writer, how: str, tied: bool) -> None:
    """A branch chosen by values: experts, the largest channels, thresholds."""
    d, layer, gate = w.channel, w.layer(), w.layer()
    value = f"F.relu({gate}(h))" if tied else f"{gate}(h)"
    source = "F.relu(h)" if tied else "h"
    if how == "argmax":
        one_hot = f"F.one_hot({value}.argmax({d}), {w.width}).to(h.dtype)"
        one_hot += ".movedim(-1, 1)" if w.images else ""
        w.line(f"h = h + torch.tanh({layer}(h)) * {one_hot}")
    elif how == "topk":
        w.line(f"v, i = {source}.topk(2, {d})")
        w.line(f"h = h + torch.tanh({layer}(torch.zeros_like(h).scatter({d}, i, v)))")
    elif how == "argsort":
        w.line(f"i = {source}.argsort({d})", f"h = h + torch.tanh({layer}(h.gather({d}, i)))")
    elif how == "route":
        w.line(f"p = {value}.softmax({d})", f"best = p.max({d}, keepdim=True)")
        w.line(f"h = h + torch.where(p == best.values, torch.tanh({layer}(h)), p)")
    elif how == "where":
        w.line(f"h = h + torch.where({source} > 0, torch.tanh({layer}(h)), 0.1 * h)")
    elif how == "ties":
        w.line(f"m = h.amax({d}, keepdim=True)", f"h = h + torch.tanh({layer}(h * (h == m)))")
    elif how == "round":
        w.line(f"h = h + torch.tanh({layer}(h)) * torch.round(2 * h.detach())")
    elif how == "sign":
        w.line(f"h = h + torch.tanh({layer}({source}.sign() * {source}.abs()))")
    else:
        w.line(f"i = {source}.detach().flatten(1).argmax(-1)")
        w.line("v = h.flatten(1).gather(1, i[:, None]).view(-1, *[1] * (h.dim() - 1))")
        w.line(f"h = h + v * torch.tanh({layer}(h))")
