"""Image datasets by name, as torch datasets of normalised tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset, random_split
from torchvision import datasets
from torchvision.transforms import v2 as transforms

from revcompile.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Images:
    """A dataset for training and one for testing, and what a model must know of them."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    size: int
    batch_size: int = 64


def digits(folder: Path | None, size: int | None) -> Images:
    """scikit-learn's 1,797 grey 8x8 digits, enlarged and in three colours: nothing to download."""
    size = size or 16
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=size, mode="bilinear")
    images = ((images - images.mean()) / images.std()).expand(-1, 3, -1, -1)
    data = TensorDataset(images, torch.tensor(raw.target))
    train, test = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return Images(train, test, classes=10, size=size, batch_size=32)


def cifar10(folder: Path | None, size: int | None) -> Images:
    """CIFAR-10 as torchvision stores it; downloaded if it is not there."""
    return _cifar(datasets.CIFAR10, 10, folder, size)


def cifar100(folder: Path | None, size: int | None) -> Images:
    """CIFAR-100, likewise."""
    return _cifar(datasets.CIFAR100, 100, folder, size)


def imagefolder(folder: Path | None, size: int | None) -> Images:
    """A folder a class, under `train/` and `val/`: ImageNet's layout."""
    root, size = _needed(folder), size or 224
    grow = transforms.RandomResizedCrop(size, antialias=True)
    fit = [transforms.Resize(size * 8 // 7, antialias=True), transforms.CenterCrop(size)]
    flip = transforms.RandomHorizontalFlip()
    train = datasets.ImageFolder(root / "train", _steps(grow, flip), loader=_opened)
    test = datasets.ImageFolder(root / "val", _steps(*fit), loader=_opened)
    if train.classes != test.classes:
        names = sorted({*train.classes} ^ {*test.classes})
        raise InputError(f"train/ and val/ differ in their classes: {', '.join(names[:3])}")
    return Images(train, test, classes=len(train.classes), size=size)


def fake(folder: Path | None, size: int | None) -> Images:
    """Noise with labels: for trying things out."""
    size = size or 32
    data = datasets.FakeData(160, (3, size, size), 10, transform=_steps())
    return Images(Subset(data, range(128)), Subset(data, range(128, 160)), classes=10, size=size)


DATASETS: dict[str, Callable[[Path | None, int | None], Images]] = {
    function.__name__: function for function in (digits, cifar10, cifar100, imagefolder, fake)
}


def _cifar(kind: Any, classes: int, folder: Path | None, size: int | None) -> Images:
    root, size = _needed(folder), size or 32
    resize = [transforms.Resize(size, antialias=True)] if size != 32 else []
    augment = (transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip())
    train = kind(root, train=True, transform=_steps(*augment, *resize), download=True)
    test = kind(root, train=False, transform=_steps(*resize), download=True)
    return Images(train, test, classes=classes, size=size)


def _steps(*steps: Any) -> Callable[[Any], Tensor]:
    as_floats = [transforms.ToImage(), transforms.ToDtype(torch.float32, scale=True)]
    pipeline: Callable[[Any], Tensor] = transforms.Compose(
        [*steps, *as_floats, transforms.Normalize(MEAN, STD)]
    )
    return pipeline


def _opened(path: str) -> Any:
    try:
        return datasets.folder.default_loader(path)
    except OSError as error:
        raise InputError(f"{path} is not an image that can be read ({error})") from error


def _needed(folder: Path | None) -> Path:
    if folder is None:
        raise InputError("needs --data-dir, the folder it is in (or is put into)")
    return folder.expanduser()
