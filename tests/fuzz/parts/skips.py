"""Connections over several blocks: U-nets, dense blocks, second streams, shared weights."""

from tests.fuzz.net import part
from tests.fuzz.writer import Writer


@part("skips", homes=("inline", "module"), what=("h", "layer", "detached"))
def save(w: Writer, what: str) -> None:
    """Keep the activation for a later part."""
    name = w.gives("skip")
    value = {"h": "h", "layer": f"{w.layer()}(h)", "detached": "h.detach()"}[what]
    w.line(f"{name} = {value}", f"h = h + torch.tanh({w.layer()}(h))")
    w.saved.append(f"skip {name} {w.width}")


def kept(w: Writer) -> list[str]:
    """Earlier activations of today's width."""
    return [s.split()[1] for s in w.saved if s.startswith("skip") and s.endswith(f" {w.width}")]


@part("skips", how=("add", "cat", "multiply", "inside", "difference"))
def join(w: Writer, how: str) -> None:
    """Read what an earlier part kept."""
    if not kept(w):
        save(w, "h")
    skip, layer = w.reads(kept(w)[-1]), w.layer()
    w.line(f"s = {skip}")
    if w.images:
        w.line("if s.shape != h.shape:", "    s = F.adaptive_avg_pool2d(s, h.shape[2:])")
    if how == "add":
        w.line("h = h + s", f"h = h + torch.tanh({layer}(h))")
    elif how == "cat":
        w.line(f"h = h + torch.tanh({w.layer(into=2 * w.width)}(torch.cat([h, s], {w.channel})))")
    elif how == "multiply":
        w.line(f"h = h + s * torch.tanh({layer}(h))")
    elif how == "inside":
        w.line(f"h = h + torch.tanh({layer}(h + s))")
    else:
        w.line(f"h = h + torch.tanh({layer}(h - s))", "h = h + 0.5 * s")


@part("skips", how=("dense", "long", "highway", "nested"))
def dense(w: Writer, how: str) -> None:
    """Several inputs of one layer, and sums over several blocks."""
    one, other = w.layer(), w.layer()
    if how == "dense":
        last = w.layer(into=3 * w.width)
        w.line(f"a = torch.tanh({one}(h))", f"b = torch.tanh({other}(a))")
        w.line(f"h = h + {last}(torch.cat([h, a, b], {w.channel}))")
    elif how == "long":
        w.line("start = h", f"h = h + torch.tanh({one}(h))", f"h = h + torch.tanh({other}(h))")
        w.line("h = h + start")
    elif how == "highway":
        w.line(f"g = torch.sigmoid({one}(h))", f"h = g * h + (1 - g) * torch.tanh({other}(h))")
    else:
        w.line(f"u = {one}(h)", f"u = u + torch.tanh({other}(u))", "h = h + u")


@part("skips", how=("leapfrog", "late", "both", "shared"), blocks=(2, 1))
def streams(w: Writer, how: str, blocks: int) -> None:
    """A second stream beside the first."""
    w.line(f"u = torch.tanh({w.layer()}(h))")
    for _ in range(blocks):
        one, other = w.layer(), w.layer()
        if how == "leapfrog":
            w.line(f"h = h + torch.tanh({one}(u))", f"u = u + torch.tanh({other}(h))")
        elif how == "late":
            w.line(f"u = u + torch.tanh({one}(u))", f"h = h + torch.tanh({other}(h))")
        elif how == "both":
            w.line("s = h + u", f"h = h + torch.tanh({one}(s))", f"u = u + torch.tanh({other}(s))")
        else:
            w.line(f"h = h + torch.tanh({one}(h))", f"u = u + torch.tanh({one}(u))")
    w.line("h = h + u")


@part("skips", how=("layer", "weight", "transposed", "bias", "functional"))
def tied(w: Writer, how: str) -> None:
    """Weights that are read in several places."""
    one = w.layer()
    if how == "layer":
        w.line(f"h = h + torch.tanh({one}(h))", f"h = h + torch.sin({one}(h))")
        return
    other = w.layer()
    if how == "functional" or (how == "transposed" and not w.images):
        weight = f"{one}.weight" + (".T" if how == "transposed" else "")
        call = f"F.conv2d(h, {weight}, padding=1)" if w.images else f"F.linear(h, {weight})"
        w.line(f"h = h + torch.tanh({one}(h))", f"h = h + torch.tanh({other}(h))")
        w.line(f"h = h + torch.sin({call})")
        return
    name = "bias" if how == "bias" else "weight"
    w.init(f"{other}.{name} = {one}.{name}")
    w.line(f"h = h + torch.tanh({one}(h))", f"h = h + torch.sin({other}(h))")
