"""Train a compiled model on scikit-learn's digits: no download, two CPU cores are enough.

Any model of timm will do. `petrafy` rewires its residual blocks into reversible couplings, cuts it
into balanced stages and generates each stage's programs; the trainer runs them, here all in one
process, with PETRA or any other method of the table.

    python examples/train_compiled.py
    python examples/train_compiled.py --method 1f1b --accumulate 4
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
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import revcompile
from revcompile.runtime.trainer import Trainer

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
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def create_model(name: str) -> nn.Module:
    """The timm model `name` for small grey images."""
    model: nn.Module = timm.create_model(name, in_chans=1, num_classes=NUM_CLASSES)
    if resize := getattr(model, "set_input_size", None):  # transformers are built for one size
        resize(img_size=IMAGE_SIZE)
    return model


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The share of a batch that is classified correctly."""
    return (logits.argmax(1) == y).float().mean().item()


def train(trainer: Trainer, loader: Loader, epochs: int, console: Console) -> None:
    """Feed micro-batches; the pipeline is drained once, at the end."""
    with Progress(*progress_columns(), console=console) as progress:
        for epoch in range(1, epochs + 1):
            bar = progress.add_task(f"epoch {epoch}", total=len(loader), status="")
            start, images = time.perf_counter(), 0
            history = []
            for x, y in loader:
                metrics = trainer.step(x, y)
                history.append(
                    (metrics.loss, accuracy(metrics.output, y.to(metrics.output.device)))
                )
                images += len(x)
                speed = images / (time.perf_counter() - start)
                progress.update(bar, advance=1, status=describe(history, speed))
        trainer.flush()


def progress_columns() -> tuple[ProgressColumn, ...]:
    """What a line of the progress display shows."""
    name, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
    return name, BarColumn(), MofNCompleteColumn(), status


def describe(history: Sequence[tuple[float, float]], speed: float) -> str:
    """The averages of an epoch so far, for the progress bar."""
    loss, share = map(fmean, zip(*history, strict=True))
    return f"loss {loss:.3f}  accuracy {share:6.1%}  {speed:5.0f} images/s"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="resnet18", help="name of a timm model")
    parser.add_argument("--policy", default="paper", help="how revcompile rewires the model")
    parser.add_argument("--stages", type=int, default=4, help="how many stages to cut it into")
    parser.add_argument("--method", default="petra", help="petra, backprop, 1f1b, pipedream, ...")
    parser.add_argument("--order", help='"half" the paper\'s delay (the default) or "paper"')
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches an update")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02, help="the peak learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    """Compile, train and test; returns the test accuracy."""
    args = parse_args(argv)
    console = Console()
    torch.manual_seed(args.seed)
    train_data, test_data = load_data(args.batch_size, args.seed)

    model = create_model(args.model).to(args.device)
    example = torch.randn(2, 1, IMAGE_SIZE, IMAGE_SIZE, device=args.device)
    net = revcompile.petrafy(model, args.stages, example_inputs=example, policy=args.policy)
    print(net)

    updates = args.epochs * len(train_data) // args.accumulate + 1
    trainer = net.trainer(
        optimizer=lambda p: SGD(p, lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
        lr_schedule=lambda optimizer: OneCycleLR(optimizer, args.lr, total_steps=updates),
        loss=F.cross_entropy,
        method=args.method,
        order=args.order,
        accumulate=args.accumulate,
        seed=args.seed,
    )
    train(trainer, train_data, args.epochs, console)
    result = trainer.evaluate(test_data, metrics={"accuracy": accuracy})
    console.print(f"test accuracy {result.metrics['accuracy']:.1%}")
    return result.metrics["accuracy"]


if __name__ == "__main__":
    main()
