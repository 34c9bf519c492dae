"""Random layers, and regions whose gradient is not what it seems."""

from typing import Final

from tests.fuzz.net import part
from tests.fuzz.writer import Writer

RANDOM: Final = (
    *("layer", "functional", "bernoulli", "rand", "bernoulli_", "feature", "noise", "side"),
    *("gumbel", "inplace", "layer drop"),
)


@part("random", how=RANDOM, p=(0.3, 0.0), place=("branch", "stream"))
def dropped(w: Writer, how: str, p: float, place: str) -> None:
    """Dropout and its relatives."""
    layer = w.layer()
    ones = "[h.shape[0]] + [1] * (h.dim() - 1)"
    w.line(f"f = torch.tanh({layer}(h))" if place == "branch" else "f = h")
    if how == "layer drop":
        w.line(f"if self.training and torch.rand([]) < {p}:", "    f = 0 * f")
    elif how in ("layer", "inplace"):
        rest = ", inplace=True" if how == "inplace" else ""
        w.line(f"f = {w.member('drop', f'nn.Dropout({p}{rest})')}(f)")
    elif how == "functional":
        w.line(f"f = F.dropout(f, {p}, training=self.training)")
    elif how == "feature":
        if w.images:
            w.line(f"f = F.dropout2d(f, {p}, self.training)")
        else:
            w.line(f"f = {w.member('drop', f'nn.AlphaDropout({p})')}(f)")
    else:
        draws = {
            "bernoulli": f"f * torch.bernoulli(torch.full_like(f, 1 - {p}))",
            "rand": f"f * (torch.rand({ones}, dtype=f.dtype, device=f.device) > {p})",
            "bernoulli_": f"f * f.new_empty({ones}).bernoulli_(1 - {p}) / (1 - {p})",
            "noise": "f + 0.1 * torch.randn_like(f)",
            "gumbel": f"f * F.gumbel_softmax(f, dim={w.channel})",
            "side": "f * keep",
        }
        if how == "side":
            w.line(f"keep = torch.rand({ones}, dtype=h.dtype, device=h.device)")
        w.line("if self.training:", f"    f = {draws[how]}")
    if place == "branch":
        w.line("h = h + f")
        if how == "side":
            w.line("if self.training:", f"    h = h + keep * torch.tanh({w.layer()}(h))")
    else:
        w.line("h = f", f"h = h + torch.tanh({layer}(h))")


@part("gradients", how=("detach", "no_grad", "stop branch", "straight through", "frozen", "target"))
def stopped(w: Writer, how: str) -> None:
    """Values that pass no gradient."""
    one, other = w.layer(), w.layer()
    if how == "detach":
        w.line(f"h = h + torch.tanh({one}(h)) * torch.tanh({other}(h.detach()))")
    elif how == "no_grad":
        w.line("with torch.no_grad():", f"    g = torch.tanh({other}(h))")
        w.line(f"h = h + g * torch.tanh({one}(h))")
    elif how == "stop branch":
        w.line(f"h = h + torch.tanh({one}(h)).detach()", f"h = h + torch.tanh({other}(h))")
    elif how == "straight through":
        w.line(f"q = torch.sigmoid({one}(h))", "q = q + (q.round() - q).detach()")
        w.line(f"h = h + q * torch.tanh({other}(h))")
    elif how == "frozen":
        w.init(f"{one}.requires_grad_(False)")
        w.line(f"h = h + torch.tanh({one}(h))", f"h = h + torch.tanh({other}(h))")
    else:
        w.line("start = h.detach()", f"h = h + torch.tanh({one}(h))")
        w.line(f"h = h + (h - start) * torch.tanh({other}(h))")


FUNCTION: Final = """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return ctx.slope * gradient * (x.abs() < 1).to(x.dtype), None
"""
PAIR: Final = """
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return first * y + second, first * x + second
"""


@part("gradients", how=("function", "pair", "checkpoint", "checkpoint old", "hook", "grad mode"))
def custom(w: Writer, how: str) -> None:
    """Custom autograd functions, checkpoints and hooks."""
    one, other = w.layer(), w.layer()
    if how == "function":
        w.helper("Sign", FUNCTION)
        w.line(f"h = h + Sign.apply({one}(h), 0.5)", f"h = h + torch.tanh({other}(h))")
    elif how == "pair":
        w.helper("Both", PAIR)
        w.line(
            f"a, b = Both.apply({one}(h), {other}(h))",
            "h = h + torch.tanh(a)",
            "h = h + torch.sin(b)",
        )
    elif how.startswith("checkpoint"):
        old = str(how == "checkpoint old")
        w.line(f"h = h + torch.tanh(checkpoint({one}, h, use_reentrant={old}))")
        w.line(f"h = h + torch.tanh({other}(h))")
    elif how == "hook":
        w.init(f"{one}.register_forward_hook(lambda module, args, out: 0.5 * out)")
        w.line(f"h = h + torch.tanh({one}(h))")
    else:
        w.line("with torch.set_grad_enabled(self.training):", f"    f = torch.tanh({one}(h))")
        w.line("h = h + f", f"h = h + torch.tanh({other}(h))")


WEIGHTS: Final = (
    *("weight_norm", "old weight_norm", "orthogonal", "functional", "buffer weight", "expression"),
    "list",
)


@part("gradients", how=WEIGHTS)
def parameters(w: Writer, how: str) -> None:
    """Weights that are computed, or lie in unusual places."""
    one = w.layer()
    if how == "weight_norm":
        w.init(f"nn.utils.parametrizations.weight_norm({one})")
        w.line(f"h = h + torch.tanh({one}(h))")
    elif how == "old weight_norm":
        w.init(f"nn.utils.weight_norm({one})")
        w.line(f"h = h + torch.tanh({one}(h))")
    elif how == "orthogonal":
        w.init(f"nn.utils.parametrizations.orthogonal({one})" if not w.images else "pass")
        w.line(f"h = h + torch.tanh({one}(h))")
    elif how == "expression":
        scale = w.member("scale", "nn.Parameter(torch.tensor(0.3))")
        call = "F.conv2d(h, {}, padding=1)" if w.images else "F.linear(h, {})"
        weight = f"{one}.weight * F.softplus({scale})"
        w.line(f"h = h + torch.tanh({call.format(weight)})")
    elif how == "buffer weight":
        size = f"{w.width}, {w.width}" + (", 3, 3" if w.images else "")
        fixed = w.buffer("fixed", f"torch.randn({size}) / {w.width}")
        call = f"F.conv2d(h, {fixed}, padding=1)" if w.images else f"F.linear(h, {fixed})"
        w.line(f"h = h + torch.tanh({call})", f"h = h + torch.tanh({one}(h))")
    elif how == "list":
        shape = f"{w.width}, 1, 1" if w.images else str(w.width)
        pair = w.member("pair", f"nn.ParameterList([torch.randn({shape}) for _ in range(2)])")
        w.line(f"for p in {pair}:", f"    h = h + p * torch.tanh({one}(h))")
    else:
        bias = f"{one}.bias" + ("[:, None, None]" if w.images else "")
        w.line(f"h = h + torch.tanh({one}(h)) * {bias}", f"h = h + torch.tanh({one}(h))")
