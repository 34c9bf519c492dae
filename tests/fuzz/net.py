"""The description of a random net: plain values whose repr builds the net again."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

from tests.fuzz.writer import Writer

LAYOUTS: Final = ("rows", "tokens", "images", "words")
HOMES: Final = ("inline", "module", "twice", "list", "shared")
"""Where a part is written: into the net's forward; into a class of its own; that class two times,
called in a row; in a ModuleList walked by a loop; one instance called two times."""
RESULTS: Final = ("tensor", "tuple", "dict", "nested", "sequence")
PRECISIONS: Final = ("float64",) * 8 + ("float32", "bfloat16")
CALLS: Final = ("positional", "keywords")
EXTRAS: Final = ("none", "none", "frozen", "unused", "tied", "bare", "sparse")
"""Of the net's parameters: one frozen, never read, tied, no layer's, or with sparse gradients."""


@dataclass(frozen=True)
class Part:
    """A few lines of the net: an entry of the catalogue with its options chosen."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    home: str = "inline"


@dataclass(frozen=True)
class Net:
    """A random net. `precision` "bfloat16" means float32 weights under autocast."""

    layout: str
    parts: tuple[Part, ...]
    result: str = "tensor"
    call: str = "positional"
    precision: str = "float64"
    extra: str = "none"
    stages: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Kind:
    """An entry of the catalogue: writes a part into a net of certain layouts."""

    name: str
    write: Callable[..., None]
    options: Mapping[str, tuple[Any, ...]]
    layouts: tuple[str, ...]
    homes: tuple[str, ...]
    family: str


CATALOGUE: dict[str, Kind] = {}
"""Every kind of part by name."""


def part(
    family: str,
    *,
    layouts: tuple[str, ...] = LAYOUTS,
    homes: tuple[str, ...] = HOMES,
    **options: tuple[Any, ...],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function into the catalogue; the first value of each option is the simplest."""

    def enter(write: Callable[..., None]) -> Callable[..., None]:
        name = write.__name__
        CATALOGUE[name] = Kind(name, write, options, layouts, homes, family)
        return write

    return enter


T = TypeVar("T")


class Choices(Protocol):
    """All that the generator asks for. Earlier options and smaller numbers are simpler."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        ...

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        ...


class Seeded(random.Random):
    """Choices of a pseudo-random generator."""

    integer = random.Random.randint

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.randrange(len(options))]


def net_of(seed: int, index: int) -> Net:
    """The net with this number: the same on every machine."""
    return draw_net(Seeded(f"{seed}:{index}"))


def draw_net(choices: Choices) -> Net:
    """A net, simplest first in every choice."""
    layout = choices.pick(LAYOUTS)
    parts = tuple(draw_part(choices, layout) for _ in range(choices.integer(1, 4)))
    return Net(
        layout,
        parts,
        result=choices.pick(RESULTS),
        call=choices.pick(CALLS),
        precision=choices.pick(PRECISIONS),
        extra=choices.pick(EXTRAS),
        stages=choices.integer(2, 4),
        seed=choices.integer(0, 9),
    )


def draw_part(choices: Choices, layout: str) -> Part:
    """A part for a net of some layout: first its family, so that each is met as often."""
    fitting = [kind for kind in CATALOGUE.values() if layout in kind.layouts]
    families = list(dict.fromkeys(kind.family for kind in fitting))
    family = choices.pick(families)
    kind = choices.pick([one for one in fitting if one.family == family])
    options = {name: choices.pick(values) for name, values in kind.options.items()}
    return Part(kind.name, options, choices.pick(kind.homes))


def simpler(net: Net) -> Iterator[Net]:
    """Nets that are one step simpler, the largest steps first."""
    if len(net.parts) > 1:
        for i in range(len(net.parts)):
            yield replace(net, parts=net.parts[:i] + net.parts[i + 1 :])
    for name, values in (
        ("result", RESULTS),
        ("call", CALLS),
        ("precision", PRECISIONS),
        ("extra", EXTRAS),
        ("stages", (2,)),
        ("seed", (0,)),
    ):
        if getattr(net, name) != values[0]:
            yield replace(net, **{name: values[0]})
    if net.layout != "rows" and all("rows" in CATALOGUE[p.kind].layouts for p in net.parts):
        yield replace(net, layout="rows")
    for i, one in enumerate(net.parts):
        for other in _simpler_part(one):
            yield replace(net, parts=(*net.parts[:i], other, *net.parts[i + 1 :]))


def _simpler_part(one: Part) -> Iterator[Part]:
    kind = CATALOGUE[one.kind]
    homes = kind.homes
    for home in homes[: homes.index(one.home)][:2]:
        yield replace(one, home=home)
    for name, values in kind.options.items():
        if one.options[name] != values[0]:
            yield replace(one, options={**one.options, name: values[0]})


def write_part(writer: Writer, one: Part) -> None:
    """Add a part to a net's text, in the home it has."""
    kind = CATALOGUE[one.kind]
    if one.home == "inline":
        kind.write(writer, **one.options)
        return
    width = writer.width
    writer.open()
    kind.write(writer, **one.options)
    name = writer.fresh("Block")
    scope = writer.close(name)
    arguments = ", ".join(["h", *(writer.reads(r) for r in scope.reads)])
    alone = not scope.gives and writer.width == width
    home = one.home if alone else "module"
    if home in ("module", "shared"):
        call = f"{writer.member('block', f'{name}()')}({arguments})"
        results = ", ".join(["h", *scope.gives])
        writer.line(*[f"{results} = {call}"] * (2 if home == "shared" else 1))
    elif home == "twice" and not scope.reads:
        writer.line(f"h = {writer.member('blocks', f'nn.Sequential({name}(), {name}())')}(h)")
    else:
        blocks = writer.member("blocks", f"nn.ModuleList({name}() for _ in range(2))")
        writer.line(f"for block in {blocks}:", f"    h = block({arguments})")
    writer.scope.gives.extend(scope.gives)
