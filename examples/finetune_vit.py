"""Fine-tune a pretrained timm model reversibly, in a training loop of your own.

`reversify` gives an ordinary `nn.Module` that stores no activations of reversible blocks. With
`policy="pretrained"` it starts as the original's function, and `to_original` gives the original
with the new weights. Nothing is downloaded: the "pretrained" weights are made first.

    python examples/finetune_vit.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from images import Images, digits
from rich.progress import track
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import revcompile


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Load, make reversible, fine-tune, save; returns the test accuracy before and after."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="test_vit", help="name of a timm model")
    parser.add_argument("--epochs", type=int, default=3, help="of training, and of fine-tuning")
    parser.add_argument("--out", type=Path, default=Path("out/finetuned_vit"))
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    data = digits(None, 32)
    options: dict[str, Any] = {"num_classes": data.classes, "img_size": data.size}

    args.out.mkdir(parents=True, exist_ok=True)
    model = timm.create_model(args.model, **options)
    fit(model, data, args.epochs, what="making pretrained weights")
    save_file(model.state_dict(), args.out / "pretrained.safetensors")

    # Load weights as timm does from its hub, but from this file.
    weights = {"file": str(args.out / "pretrained.safetensors"), "num_classes": data.classes}
    model = timm.create_model(
        args.model, pretrained=True, pretrained_cfg_overlay=weights, **options
    )
    net = revcompile.reversify(model, next(iter(loader(data)))[0], policy="pretrained")
    print(net.summary())
    before = test(net, data)
    assert before == test(model, data)
    fit(net, data, args.epochs, what="fine-tuning")

    original = net.to_original()  # of timm's class, to save and serve
    after = test(original, data)
    print(f"test accuracy {before:.1%} -> {after:.1%}")
    save_file(original.state_dict(), args.out / "finetuned.safetensors")
    return before, after


def loader(data: Images) -> DataLoader[list[torch.Tensor]]:
    """Batches to train on."""
    return DataLoader(data.train, 32, shuffle=True)


def fit(model: nn.Module, data: Images, epochs: int, what: str) -> None:
    """A plain training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for x, y in track(loader(data), what, transient=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@torch.no_grad()
def test(model: nn.Module, data: Images) -> float:
    """Accuracy on the test images."""
    model.eval()
    right = [(model(x).argmax(1) == y).float() for x, y in DataLoader(data.test, 64)]
    return torch.cat(right).mean().item()


if __name__ == "__main__":
    main()
