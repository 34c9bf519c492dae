"""Residual blocks: how a branch is built and how it is added to its shortcut."""

from typing import Final

from tests.fuzz.net import part
from tests.fuzz.writer import Writer

ACTIVATIONS: Final = ("torch.tanh({})", "F.relu({})", "F.gelu({})", "torch.sigmoid({})")
SUMS: Final = (
    *("h = h + {}", "h = {} + h", "h = torch.add(h, {})", "h = h.add({})", "h = h + 0.5 * {}"),
    *("h = torch.add(h, {}, alpha=0.5)", "h = 0.7 * h + {}", "h = h - {}", "h += {}"),
    *("h = sum([h, {}])", "h = torch.stack([h, {}]).sum(0)"),
)


@part("blocks", order=("plain", "pre", "post"), norm=("layer", "batch"), act=ACTIVATIONS, add=SUMS)
def residual(w: Writer, order: str, norm: str, act: str, add: str) -> None:
    """A shortcut around one layer; the norm before the branch, or behind the sum."""
    layer, before = w.layer(), "h"
    if order == "pre":
        before = f"{w.norm(norm)}(h)"
    w.line(add.format(act.format(f"{layer}({before})")))
    if order == "post":
        w.line(f"h = {w.norm(norm)}(h)")


@part(
    "blocks", norm=("layer", "batch"), behind=("F.relu(h)", "F.relu(h, inplace=True)", "h.relu()")
)
def post_activation(w: Writer, norm: str, behind: str) -> None:
    """ResNet v1: the activation stands behind the sum."""
    one, other, n = w.layer(), w.layer(), w.norm(norm)
    w.line(f"f = {other}(F.relu({n}({one}(h))))", "h = h + f", f"h = {behind}")


@part("blocks", homes=("inline", "module"), wider=(False, True), stride=(1, 2), act=(True, False))
def projected(w: Writer, wider: bool, stride: int, act: bool) -> None:
    """A transition: both the branch and the shortcut have a layer."""
    out = w.width + 2 if wider else w.width
    stride = stride if w.images else 1
    norm = w.norm("layer")
    branch, shortcut = w.layer(out, stride), w.layer(out, stride)
    total = f"{branch}({norm}(h)) + {shortcut}(h)"
    w.line(f"h = F.relu({total})" if act else f"h = {total}")
    w.width = out


@part("blocks", terms=(2, 3), shared_norm=(True, False))
def parallel(w: Writer, terms: int, shared_norm: bool) -> None:
    """Several branches of one input in one sum."""
    w.line(f"u = {w.norm()}(h)" if shared_norm else "u = h")
    branches = [f"torch.tanh({w.layer()}(u))" for _ in range(terms)]
    w.line(f"h = h + {' + '.join(branches)}")


@part("blocks", how=("parameter", "number", "learned skip", "mean"))
def scaled(w: Writer, how: str) -> None:
    """Layer scale and scaled shortcuts."""
    layer = w.layer()
    if how == "parameter":
        shape = "(6, 1, 1)" if w.images else "6"
        gamma = w.member("gamma", f"nn.Parameter(torch.randn({shape.replace('6', str(w.width))}))")
        w.line(f"h = h + {gamma} * torch.tanh({layer}(h))")
    elif how == "number":
        w.line(f"h = (h + torch.tanh({layer}(h))) / math.sqrt(2)")
    elif how == "learned skip":
        alpha = w.member("alpha", "nn.Parameter(torch.tensor(0.8))")
        w.line(f"h = {alpha} * h + torch.tanh({layer}(h))")
    else:
        w.line(f"h = h + torch.tanh({layer}(h - h.mean({w.channel}, keepdim=True)))")


ATTENTION: Final = ("chunk", "unbind", "split", "sdpa", "softmax", "mha", "encoder layer")


@part("blocks", layouts=("tokens", "words"), how=ATTENTION, masked=(False, True))
def attention(w: Writer, how: str, masked: bool) -> None:
    """Self-attention as people write it."""
    d = w.width
    if how == "encoder layer":
        layer = f"nn.TransformerEncoderLayer({d}, 2, {d}, 0.0, norm_first=True, batch_first=True)"
        w.line(f"h = {w.member('encoder', layer)}(h)")
        return
    w.line(f"u = {w.norm()}(h)")
    if how == "mha":
        mha = w.member("attend", f"nn.MultiheadAttention({d}, 2, batch_first=True)")
        mask = f", key_padding_mask=~{w.reads('mask')}" if masked else ""
        w.line(f"a, weights = {mha}(u, u, u{mask})", "h = h + a")
        return
    qkv, out = w.layer(3 * d), w.layer()
    w.line("n, t, d = u.shape")
    if how == "unbind":
        w.line(f"q, k, v = {qkv}(u).view(n, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)")
    else:
        cut = f"split({d}, -1)" if how == "split" else "chunk(3, -1)"
        w.line(f"q, k, v = {qkv}(u).{cut}")
        w.line("q, k, v = (s.view(n, t, 2, d // 2).transpose(1, 2) for s in (q, k, v))")
    if how == "sdpa":
        mask = f", attn_mask={w.reads('mask')}[:, None, None, :]" if masked else ""
        w.line(f"a = F.scaled_dot_product_attention(q, k, v{mask})")
    else:
        w.line("s = q @ k.transpose(-2, -1) / math.sqrt(d // 2)")
        if masked:
            w.line(f"s = s.masked_fill(~{w.reads('mask')}[:, None, None, :], -1e9)")
        w.line("a = s.softmax(-1) @ v")
    w.line(f"h = h + {out}(a.transpose(1, 2).reshape(n, t, d))")


@part("blocks", layouts=("images",), gate=("sigmoid", "softmax"))
def squeeze_excite(w: Writer, gate: str) -> None:
    """A gate of the whole image in the branch."""
    layer, one = w.layer(), w.member("squeeze", f"nn.Conv2d({w.width}, {w.width}, 1)")
    norm = w.norm("batch")
    act = "torch.sigmoid(g)" if gate == "sigmoid" else "g.softmax(1)"
    w.line(f"f = {norm}({layer}(h))", f"g = {one}(f.mean((2, 3), keepdim=True))")
    w.line(f"h = h + f * {act}")


@part("blocks", layouts=("images",), homes=("inline", "module"), how=("pool", "conv", "unshuffle"))
def downsample(w: Writer, how: str) -> None:
    """A transition without shortcut."""
    if how == "pool":
        w.line("h = F.avg_pool2d(h, 2, ceil_mode=True)")
    elif how == "conv":
        w.line(f"h = torch.tanh({w.layer(stride=2)}(h))")
    else:
        layer = w.layer(into=4 * w.width)
        w.line("h = h[:, :, : h.shape[2] // 2 * 2, : h.shape[3] // 2 * 2]")
        w.line(f"h = {layer}(F.pixel_unshuffle(h, 2))")


@part(
    "blocks",
    how=("clamp", "relu", "relu6", "round", "max pool", "zeros"),
    read=("topk", "relu", "max"),
)
def rectified(w: Writer, how: str, read: str) -> None:
    """An activation on the stream that makes exact ties, and a block that decides between them."""
    d = w.channel
    calls = {
        "clamp": "h.clamp(-0.3, 0.3)",
        "relu": "F.relu(h)",
        "relu6": "F.relu6(h + 5.7)",
        "round": "h + (torch.round(2 * h) / 2 - h).detach()",
        "max pool": "F.max_pool2d(h, 3, 1, 1)" if w.images else "h.cummax(-1).values",
        "zeros": "h * (h > 0)",
    }
    seen = {
        "topk": f"torch.zeros_like(h).scatter({d}, h.topk(2, {d}).indices, 1.0)",
        "relu": "F.relu(h - 0.3)",
        "max": f"h.max({d}, keepdim=True).values - h",
    }[read]
    w.line(f"h = {calls[how]}", f"h = h + torch.tanh({w.layer()}({seen}))")


@part("blocks", bias=(False, True), norm=("layer", "root mean square"))
def gated_mlp(w: Writer, bias: bool, norm: str) -> None:
    """Llama's feed-forward block: three layers of one size."""
    first, last, gate = (w.layer() for _ in range(3))
    if norm == "layer":
        w.line(f"u = {w.norm()}(h)")
    else:
        weight = w.member("weight", "nn.Parameter(torch.ones(()))")
        square = f"h.pow(2).mean({w.channel}, keepdim=True)"
        w.line(f"u = {weight} * h * torch.rsqrt({square} + 1e-6)")
    w.line(f"h = h + {last}(F.silu({first}(u)) * {gate}(u))")
    if not bias and not w.images:
        w.init(f"{first}.bias = None")


@part("blocks", layouts=("rows",), how=("index_add", "scatter_add", "index_add_", "put"))
def messages(w: Writer, how: str) -> None:
    """A graph network: messages summed at the rows they are for."""
    layer = w.layer()
    w.line("target = torch.arange(h.shape[0], device=h.device).flip(0) // 2")
    w.line(f"message = torch.tanh({layer}(h[target]))")
    totals = {
        "index_add": "torch.zeros_like(h).index_add(0, target, message)",
        "scatter_add": "torch.zeros_like(h).scatter_add(0, target[:, None].expand_as(h), message)",
        "index_add_": "torch.zeros_like(h).index_add_(0, target, message)",
        "put": "torch.zeros_like(h).index_put((target,), message, accumulate=True)",
    }
    w.line(f"h = h + {totals[how]}")
