"""Operations and layers that write into what they are given, and views."""

import re
from typing import Final

from tests.fuzz.net import part
from tests.fuzz.writer import Writer

BEHIND: Final = (
    *("{}", "nn.Identity()({})", "{}.view({}.shape)", "{}.reshape({}.shape)", "{}.chunk(1, 0)[0]"),
    *("{}[:]", "{}.contiguous()", "nn.Dropout(0.0)({})", "{}.unsqueeze(0).squeeze(0)"),
    "{}.to({}.dtype)",
)


@part(
    "in place",
    layer=("nn.ReLU(inplace=True)", "nn.SiLU(inplace=True)", "nn.Hardtanh(inplace=True)"),
    behind=BEHIND,
    source=("h", "u"),
    norm=(False, True),
)
def inplace_layer(w: Writer, layer: str, behind: str, source: str, norm: bool) -> None:
    """A layer that overwrites its input, behind something that may be the same memory."""
    act, linear = w.member("act", layer), w.layer()
    if source == "u":
        w.line(f"u = {w.layer()}(h)")
    value = behind
    for known in ("nn.Identity()", "nn.Dropout(0.0)"):
        if behind.startswith(known):
            value = behind.replace(known, w.member("same", known))
    value = value.replace("{}", source)
    if norm:
        w.line(f"h = h + {w.norm()}({linear}({act}({value})))")
    else:
        w.line(f"h = h + {linear}({act}({value}))")
    if source == "u":
        w.line("h = h + 0.1 * u")


WRITES: Final = (
    *("h.mul_(0.5)", "h.relu_()", "h.clamp_(-1, 1)", "F.relu(h, inplace=True)"),
    *("h[:, 0] = h[:, 1] * 2", "h[:, 0] += 1", "h[:, :1].mul_(2)", "h[h > 0.5] = 0.5"),
    *("h.masked_fill_(h > 1, 0.0)", "h.transpose(0, 1)[0] *= 2", "h.add_(torch.sin(h))"),
    *("v = h.view(-1); v += 0.1", "v = h[:, 1:]; v.tanh_()", "torch.add(h, 1, out=None)"),
    *("h.index_fill_(1, torch.tensor([0]), 0.2)", "h.narrow(1, 0, 1).zero_()"),
    *("h.index_copy_(1, torch.tensor([1]), h[:, :1].clone())", "torch.Tensor.mul_(h, 0.9)"),
    "h.select(1, 0).copy_(h.select(1, 1))",
)


@part("in place", what=WRITES, before=("copied", "branch", "bare"), keep=(False, True))
def written(w: Writer, what: str, before: str, keep: bool) -> None:
    """Writing into the activation, or into a value of the branch, between two blocks."""
    one, other = w.layer(), w.layer()
    if before == "branch":
        w.line(f"f = {one}(h)", *(["k = f"] if keep else []), re.sub(r"\bh\b", "f", what))
        w.line(f"h = h + {other}(f)", *(["h = h + 0.3 * k"] if keep else []))
        return
    w.line(f"h = h + torch.sin({one}(h))")
    if keep:
        w.line("k = h")
    if before == "copied":
        w.line("h = h.clone()")
    w.line(what, f"h = h + torch.tanh({other}(h))", *(["h = h + 0.3 * k"] if keep else []))


@part("in place", how=("iadd", "add_", "mul_ gate", "accumulate", "buffer of zeros", "slices"))
def accumulated(w: Writer, how: str) -> None:
    """Results collected in place."""
    one, other = w.layer(), w.layer()
    if how == "iadd":
        w.line(f"f = {one}(h)", f"f += {other}(h)", "h = h + torch.tanh(f)")
    elif how == "add_":
        w.line(f"f = torch.tanh({one}(h))", "h = f.add_(h)")
    elif how == "mul_ gate":
        w.line(f"f = {one}(h).mul_(torch.sigmoid({other}(h)))", "h = h + f")
    elif how == "accumulate":
        w.line("total = torch.zeros_like(h)", f"for layer in ({one}, {other}):")
        w.line("    total += torch.tanh(layer(h))", "h = h + total")
    elif how == "buffer of zeros":
        w.line("out = torch.empty_like(h)", f"out.copy_({one}(h))", "h = h + out")
    else:
        w.line("out = torch.zeros_like(h)", f"out[:, ::2] = {one}(h)[:, ::2]")
        w.line(f"out[:, 1::2] = {other}(h)[:, 1::2]", "h = h + torch.tanh(out)")


@part("in place", how=("roll", "flip", "permute", "shuffle", "expand", "strided", "flatten"))
def viewed(w: Writer, how: str) -> None:
    """Views and rearrangements between and inside blocks."""
    layer, d = w.layer(), w.channel
    if how in ("roll", "flip"):
        call = f"torch.roll(h, 1, {d})" if how == "roll" else f"h.flip({d})"
        w.line(f"h = {call}", f"h = h + torch.tanh({layer}(h))")
    elif how == "permute":
        w.line("h = h.transpose(0, 1)", "h = h + torch.tanh(h.mean(0, keepdim=True))")
        w.line("h = h.transpose(0, 1)", f"h = h + torch.tanh({layer}(h))")
    elif how == "shuffle":
        w.line(f"a, b = h.chunk(2, {d})", f"h = torch.cat([b, a], {d})")
        w.line(f"h = h + torch.tanh({layer}(h))")
    elif how == "expand":
        w.line(f"g = h.mean({d}, keepdim=True).expand_as(h)", f"h = h + g * torch.tanh({layer}(h))")
    elif how == "strided":
        w.line(
            f"f = torch.tanh({layer}(h))", "g = f[..., ::2]", "h = h + f * g.sum(-1, keepdim=True)"
        )
    else:
        w.line(f"f = {layer}(h)", "h = h + torch.tanh(f.flatten(1)).view_as(h)")
