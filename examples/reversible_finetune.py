"""Fine-tune a trained model reversibly on one device, in a training loop of your own.

`reversify` gives an ordinary `nn.Module` that keeps the activations of no reversible block. With
`policy="pretrained"` it starts as the function it was made of, and the original comes back from it
with the new weights.

    python examples/reversible_finetune.py
"""

import argparse
from collections.abc import Sequence

import timm
import torch
from images import Images, digits
from rich.progress import track
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import revcompile


def main(argv: Sequence[str] | None = None) -> float:
    """Train, rewire, fine-tune; returns the last test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="test_convnext", help="name of a timm model")
    parser.add_argument("--epochs", type=int, default=2, help="of training, and of fine-tuning")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    data = digits(None, 32)

    model = timm.create_model(args.model, num_classes=data.classes)
    fit(model, data, args.epochs, lr=0.02, what="training the original")
    before = test(model, data)
    print(f"the original:                {before:.1%}")

    example = torch.randn(8, 3, data.size, data.size)
    net = revcompile.reversify(model, example, policy="pretrained")
    print(net.summary())
    rewired = test(net, data)
    print(f"rewired, not yet fine-tuned: {rewired:.1%}")
    assert rewired == before

    fit(net, data, args.epochs, lr=0.005, what="fine-tuning")
    original = net.to_original()  # of the original's class, to save and serve
    accuracy = test(original, data)
    print(f"the original, fine-tuned:    {accuracy:.1%}")
    return accuracy


def fit(model: nn.Module, data: Images, epochs: int, lr: float, what: str) -> None:
    """A plain training loop."""
    loader = DataLoader(data.train, data.batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    model.train()
    for _ in range(epochs):
        for x, y in track(loader, what, transient=True):
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
