"""Values computed once and read by the branches of several blocks."""

from typing import Final

from tests.fuzz.net import part
from tests.fuzz.writer import CONDITION, Writer

STRUCTURES: Final = (
    *("chunk", "split", "unbind", "tensor_split", "tuple", "list", "dict", "nested", "named tuple"),
    "slices",
)
SOURCES: Final = ("c", "x", "h", "e")


def condition(w: Writer, source: str, out: str) -> tuple[str, str]:
    """A layer to (n, out) and its argument, from one of the inputs or from `h`."""
    into, value = w.width, w.pooled()
    if source in ("c", "e"):
        into, value = CONDITION, w.reads(source)
        value = f"{value}.mean(1)" if source == "e" else value
    elif source == "x" and w.layout != "words":
        into, value = 3 if w.images else 7, w.pooled(w.reads("x"))
    return w.member("ada", f"nn.Linear({into}, {out})"), value


@part(
    "sides",
    structure=STRUCTURES,
    source=SOURCES,
    form=("g * {}", "{} + g", "{} * (1 + g) + g"),
    opaque=(False, True),
)
def modulated(w: Writer, structure: str, source: str, form: str, opaque: bool) -> None:
    """Adaptive layer norm: gates of a condition, one for each block of a loop."""
    d = w.width
    ada, value = condition(w, source, f"{3 * d}")
    layers = w.member("layers", f"nn.ModuleList({w.layer_text()} for _ in range(3))")
    cuts = {
        "chunk": f"{ada}({value}).chunk(3, -1)",
        "split": f"{ada}({value}).split({d}, -1)",
        "unbind": f"{ada}({value}).view(-1, 3, {d}).unbind(1)",
        "tensor_split": f"{ada}({value}).tensor_split(3, -1)",
        "slices": f"[{ada}({value})[:, i * {d} : (i + 1) * {d}] for i in range(3)]",
    }
    if structure in cuts:
        w.line(f"gates = {cuts[structure]}")
    else:
        name, unpack = returning(w, structure, opaque)
        w.line(f"s = {w.member('conditions', f'{name}({ada}.in_features, {d})')}({value})")
        w.line(f"gates = {unpack}")
    w.line(f"for layer, g in zip({layers}, gates):")
    w.line(f"    g = {w.spread('g')}", f"    h = h + {form.format('torch.tanh(layer(h))')}")


def returning(w: Writer, structure: str, opaque: bool) -> tuple[str, str]:
    """A module that returns three gates in some structure; its name, and how to read them.

    An opaque one branches on tensor values, so that no tracer can see its inside.
    """
    results = {
        "tuple": ("a, b, c", "s"),
        "list": ("[a, b, c]", "s"),
        "dict": ('{"a": a, "b": b, "c": c}', '[s["a"], s["b"], s["c"]]'),
        "nested": (
            '{"first": (a, [b]), "last": c}',
            '[*s["first"][0:1], *s["first"][1], s["last"]]',
        ),
        "named tuple": ("Gates(a, b, c)", "[s.a, s.b, s.c]"),
    }
    result, unpack = results[structure]
    if structure == "named tuple":
        fields = "".join(f"    {name}: torch.Tensor\n" for name in "abc")
        w.helper("Gates", f"class Gates(NamedTuple):\n{fields}")
    name = ("Opaque" if opaque else "Gives") + structure.title().replace(" ", "")
    look = (
        "if float(v.detach().abs().sum()) > 1e9:\n            v = v / 2" if opaque else "v = v / 2"
    )
    text = f"""
class {name}(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(into, out) for _ in range(3))

    def forward(self, v):
        {look}
        a, b, c = self.a(v), self.b(v), torch.sigmoid(self.c(v))
        return {result}
"""
    return w.helper(name, text), unpack


@part("sides", source=("h", "c"), blocks=(2, 1), read=("product", "amplitude"))
def spectrum(w: Writer, source: str, blocks: int, read: str) -> None:
    """A complex filter that blocks multiply their spectrum with."""
    d, channel = w.width, w.channel
    if source == "c":
        kk, value = condition(w, "c", str(d))
        value = w.spread(f"{kk}({value})")
    else:
        value = f"{w.layer()}(h)"
    w.line(f"k = torch.fft.rfft({value}, dim={channel})")
    for _ in range(blocks):
        w.line(f"f = torch.fft.rfft({w.layer()}(h), dim={channel})")
        product = "f * k" if read == "product" else "f * k.abs()"
        w.line(f"h = h + torch.fft.irfft({product}, n={d}, dim={channel})")


REDUCTIONS: Final = ("max", "min", "sort", "topk", "median", "var_mean", "frexp", "aminmax")


@part("sides", how=REDUCTIONS, blocks=(2, 1), whole=(False, True))
def reduced(w: Writer, how: str, blocks: int, whole: bool) -> None:
    """Values of an operation with several results, read by blocks."""
    dim, layer = w.channel, w.layer()
    calls = {
        "max": f"v, i = {layer}(h).max({dim}, keepdim=True)",
        "min": f"v, i = torch.min({layer}(h), {dim}, keepdim=True)",
        "sort": f"v, i = {layer}(h).sort({dim})",
        "topk": f"v, i = {layer}(h).topk(1, {dim})",
        "median": f"v, i = {layer}(h).median({dim}, keepdim=True)",
        "var_mean": f"v, i = torch.var_mean({layer}(h), {dim}, keepdim=True)",
        "frexp": f"v, i = torch.frexp({layer}(h))",
        "aminmax": f"v, i = {layer}(h).aminmax(dim={dim}, keepdim=True)",
    }
    w.line(calls[how].replace("v, i =", "m =") if whole else calls[how])
    for _ in range(blocks):
        if whole:
            w.line("v, i = m")
        w.line(
            f"h = h + torch.tanh(v) * torch.tanh({w.layer()}(h)) + 0.1 * torch.tanh(i.to(h.dtype))"
        )


@part("sides", layer=("LSTM", "GRU"), read=("state", "steps", "both"))
def recurrent(w: Writer, layer: str, read: str) -> None:
    """The state of a recurrent layer: one call with nested results, read by blocks."""
    rnn = w.member("rnn", f"nn.{layer}({CONDITION}, {w.width}, batch_first=True)")
    w.line(f"result = {rnn}({w.reads('e')})")
    state = "result[1][0][-1]" if layer == "LSTM" else "result[1][-1]"
    gates = {"state": [state], "steps": ["result[0][:, -1]"], "both": [state, "result[0][:, 0]"]}[
        read
    ]
    for gate in gates * 2:
        w.line(f"h = h + {w.spread(gate)} * torch.tanh({w.layer()}(h))")


@part("sides", how=("parameter", "arange", "buffer", "pair", "input"), blocks=(2, 1))
def table(w: Writer, how: str, blocks: int) -> None:
    """A table that depends on sizes or parameters, computed once and read by every block."""
    d, shape = w.width, "(-1, 1, 1)" if w.images else "-1"
    if how == "parameter":
        row = w.member("row", f"nn.Parameter(torch.randn({d}))")
        w.line(f"p = torch.tanh({row}).view({shape})")
    elif how == "buffer":
        row = w.buffer("row", f"torch.linspace(-1, 1, {d})")
        w.line(f"p = {row}.view({shape})")
    elif how == "input":
        w.line(f"p = {w.reads('scale')}.view({shape})")
    elif how == "arange":
        size = "h.shape[2]" if w.images else "h.shape[1]"
        tail = "[None, None, :, None]" if w.images else "[None, :, None]" if w.sequence else ""
        w.line(f"p = torch.arange({size}, device=h.device).to(h.dtype){tail} / {size}")
    else:
        row = w.member("row", f"nn.Parameter(torch.randn({d}))")
        w.line(f"p = {row}.view({shape})", "cos, sin = p.cos(), p.sin()", "pair = (cos, sin)")
        for _ in range(blocks):
            w.line(f"h = h + pair[0] * torch.tanh({w.layer()}(h)) + pair[1] * h.flip({w.channel})")
        return
    for _ in range(blocks):
        w.line(f"h = h + p * torch.tanh({w.layer()}(h))")


@part("sides", layouts=("tokens", "words"), how=("given", "computed", "bias"), blocks=(2, 1))
def masked(w: Writer, how: str, blocks: int) -> None:
    """A mask over positions read by every block."""
    if how == "given":
        w.line(f"m = {w.reads('mask')}[..., None]")
    elif how == "computed":
        w.line("m = h.detach().sum(-1, keepdim=True) > 0")
    else:
        w.line(
            f"m = {w.reads('mask')}[..., None]", "bias = torch.zeros_like(h).masked_fill(~m, -2.0)"
        )
    for _ in range(blocks):
        branch = f"torch.tanh({w.layer()}(h{' + bias' if how == 'bias' else ''}))"
        w.line(f"h = h + {branch}.masked_fill(~m, 0.0)")


@part("sides", layouts=("tokens", "words"), stored=("keys", "memory", "list"))
def cross(w: Writer, stored: str) -> None:
    """Blocks that attend to an encoded second input."""
    d = w.width
    encode = w.member("encode", f"nn.Linear({CONDITION}, {2 * d})")
    w.line(f"memory = torch.tanh({encode}({w.reads('e')}))")
    cut = {"keys": "memory.chunk(2, -1)", "memory": f"(memory[..., :{d}], memory[..., {d}:])"}
    w.line(f"pairs = {cut.get(stored, f'[memory[..., :{d}], memory[..., {d}:]]')}")
    for _ in range(2):
        query = w.layer()
        w.line(f"a = ({query}(h) @ pairs[0].transpose(-2, -1)).softmax(-1)", "h = h + a @ pairs[1]")


@part("sides", homes=("inline", "module"), what=("gate", "pair", "size"))
def define(w: Writer, what: str) -> None:
    """A value for parts that come later."""
    if what == "size":
        name = w.gives("size")
        w.line(f"{name} = h.shape[0]", "h = h + 0")
        w.saved.append(f"size {name}")
        return
    ada, value = condition(w, "c", str(w.width if what == "gate" else 2 * w.width))
    name = w.gives("side")
    cut = "" if what == "gate" else ".chunk(2, -1)"
    w.line(f"{name} = torch.tanh({ada}({value})){cut}")
    w.saved.append(f"{what} {name} {w.width}")


def defined(w: Writer) -> list[list[str]]:
    """Earlier values that fit today's width: what they are, and their names."""
    values = [s.split() for s in w.saved if not s.startswith("skip")]
    return [value for value in values if len(value) == 2 or value[2] == str(w.width)]


@part("sides", item=(0, 1))
def use(w: Writer, item: int) -> None:
    """Blocks that read a value of an earlier part."""
    if not defined(w):
        define(w, "pair")
    what, name = defined(w)[-1][:2]
    layer, side = w.layer(), w.reads(name)
    if what == "size":
        w.line(f"h = h + torch.tanh({layer}(h).view({side}, -1)).view(h.shape)")
    else:
        gate = w.spread(side if what == "gate" else f"{side}[{item}]")
        w.line(f"h = h + {gate} * torch.tanh({layer}(h))")
