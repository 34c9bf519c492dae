"""What the drawings' tests draw, small models compiled once, and how they read a drawing."""

import dataclasses
import functools
import xml.etree.ElementTree as ET

import torch
from torch import Tensor, nn
from zoo import TinyGPT, words

import revcompile
from revcompile.inspect.drawing.network import network_svg
from revcompile.inspect.views import ModelView
from revcompile.ir.program import Partition, StageProgram

SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def tower(blocks: int) -> nn.Module:
    """Blocks of one width and different work between two layers that are not reversible."""
    inside = [Block(6, 1 + 3 * (i % 3)) for i in range(blocks)]
    return nn.Sequential(nn.Linear(4, 6), *inside, nn.Linear(6, 3))


class Hourglass(nn.Module):
    """What the first half gives skips the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = Block(8), nn.Linear(8, 4)
        self.middle = nn.Sequential(*(Block(4) for _ in range(4)))
        self.up, self.last = nn.Linear(12, 8), Block(8)

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x)
        late = self.middle(self.down(early))
        joined: Tensor = self.last(self.up(torch.cat([late, early], 1)))
        return joined


@dataclasses.dataclass(frozen=True)
class Compiled:
    net: revcompile.StagedModel

    @property
    def partition(self) -> Partition:
        return self.net._partition

    @property
    def programs(self) -> tuple[StageProgram, ...]:
        return self.net._programs(self.net.method)

    def picture(self, batch: int | None = None, name: str | None = None) -> ModelView:
        return self.net._view("", batch, name=name)[0]


@functools.cache
def compiled(model: str, stages: int) -> Compiled:
    examples: dict[str, tuple[nn.Module, Tensor]] = {
        "tower": (tower(7), torch.randn(2, 4)),
        "hourglass": (Hourglass(), torch.randn(2, 8)),
        "gpt": (TinyGPT(), words(2)[0]),
    }
    net, inputs = examples[model]
    return Compiled(revcompile.petrafy(net, num_stages=stages, example_inputs=inputs))


def parsed(facts: ModelView) -> ET.Element:
    return ET.fromstring(network_svg(facts))


def groups(root: ET.Element, class_: str) -> list[ET.Element]:
    return [one for one in root.iter() if class_ in one.get("class", "").split()]


def shown(element: ET.Element) -> list[str]:
    """Texts a reader sees; what appears under a resting pointer is not among them."""
    return [one.text or "" for one in element.iter(f"{SVG}text")]
