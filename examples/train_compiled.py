"""Train a reversible model on scikit-learn's digits: no download, two CPU cores are enough.

Any residual model of timm will do. `reversify` rewires it into two streams and returns an ordinary
`nn.Module`, so the training loop is the usual one; what changes is the memory its activations take.

    python examples/train_compiled.py
    python examples/train_compiled.py --model vit_tiny_patch16_224 --lr 0.02 --epochs 20
"""

import argparse
import time
from collections.abc import Sequence
from statistics import fmean

import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import revcompile

IMAGE_SIZE = 32
NUM_CLASSES = 10

Loader = DataLoader[tuple[Tensor, ...]]


def load_data(batch_size: int, seed: int) -> tuple[Loader, Loader]:
    """Train and test batches of the 1,797 grey 8x8 digits, enlarged and normalised."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=IMAGE_SIZE, mode="bilinear")
    images = (images - images.mean()) / images.std()
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(seed))
    return (
        DataLoader(train, batch_size, shuffle=True, drop_last=True),
        DataLoader(test, batch_size),
    )


def create_model(name: str) -> nn.Module:
    """The timm model `name` for small grey images."""
    model: nn.Module = timm.create_model(name, in_chans=1, num_classes=NUM_CLASSES)
    if resize := getattr(model, "set_input_size", None):  # transformers are built for one size
        resize(img_size=IMAGE_SIZE)
    return model


def train_step(net: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> dict[str, float]:
    """One update from one batch, and what it measured on the way."""
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item(), "accuracy": (logits.argmax(1) == y).float().mean().item()}


def train(net: nn.Module, loader: Loader, epochs: int, lr: float, console: Console) -> None:
    """An ordinary training loop: SGD with Nesterov momentum under a one-cycle learning rate."""
    optimizer = SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = OneCycleLR(optimizer, max_lr=lr, total_steps=epochs * len(loader))
    device = next(net.parameters()).device
    net.train()
    with Progress(*progress_columns(), console=console) as progress:
        for epoch in range(1, epochs + 1):
            bar = progress.add_task(f"epoch {epoch}", total=len(loader), status="")
            start = time.perf_counter()
            history = []
            for x, y in loader:
                history.append(train_step(net, optimizer, x.to(device), y.to(device)))
                scheduler.step()
                speed = len(history) * len(x) / (time.perf_counter() - start)
                progress.update(bar, advance=1, status=describe(history, speed))


def progress_columns() -> tuple[ProgressColumn, ...]:
    """What a line of the progress display shows."""
    name, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
    return name, BarColumn(), MofNCompleteColumn(), status


def describe(history: Sequence[dict[str, float]], speed: float) -> str:
    """The averages of an epoch so far, for the progress bar."""
    loss, accuracy = (fmean(step[name] for step in history) for name in ("loss", "accuracy"))
    return f"loss {loss:.3f}  accuracy {accuracy:6.1%}  {speed:5.0f} images/s"


@torch.no_grad()
def evaluate(net: nn.Module, loader: Loader) -> float:
    """The share of the loader's images that `net` classifies correctly."""
    device = next(net.parameters()).device
    net.eval()
    hits = [net(x.to(device)).argmax(1).cpu() == y for x, y in loader]
    return torch.cat(hits).float().mean().item()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="resnet18", help="name of a timm model")
    parser.add_argument("--policy", default="paper", help="how revcompile rewires the model")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05, help="the peak learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    """Compile, train and test; returns the test accuracy."""
    args = parse_args(argv)
    console = Console()
    torch.manual_seed(args.seed)
    train_data, test_data = load_data(args.batch_size, args.seed)

    example = torch.randn(2, 1, IMAGE_SIZE, IMAGE_SIZE)
    model = create_model(args.model)
    net = revcompile.reversify(model, example_inputs=(example,), policy=args.policy)
    print(net.summary())

    train(net.to(args.device), train_data, args.epochs, args.lr, console)
    accuracy = evaluate(net, test_data)
    console.print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
