"""Image datasets by name, as torch datasets of normalised tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, random_split
from torchvision import datasets
from torchvision.transforms import v2 as transforms

from revcompile.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Images:
    """A dataset for training and one for testing, their number of classes and image size."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    size: int


def digits(folder: Path | None, size: int | None) -> Images:
    """scikit-learn's 1,797 grey 8x8 digits, enlarged, in three channels: nothing to download."""
    size, raw = size or 16, load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=size, mode="bilinear")
    images = ((images - images.mean()) / images.std()).expand(-1, 3, -1, -1)
    data = TensorDataset(images, torch.tensor(raw.target))
    train, test = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return Images(train, test, 10, size)


def cifar10(folder: Path | None, size: int | None) -> Images:
    """CIFAR-10 as torchvision stores it; downloaded if it is not there."""
    root, size = _needed(folder), size or 32
    resize = [transforms.Resize(size)] if size != 32 else []
    augment = (transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip())
    train = datasets.CIFAR10(root, True, _steps(*augment, *resize), download=True)
    return Images(train, datasets.CIFAR10(root, False, _steps(*resize)), 10, size)


def imagefolder(folder: Path | None, size: int | None) -> Images:
    """A folder for each class, under `train/` and `val/`: ImageNet's layout."""
    root, size = _needed(folder), size or 224
    augment = (transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip())
    fit = (transforms.Resize(size * 8 // 7), transforms.CenterCrop(size))
    train = datasets.ImageFolder(str(root / "train"), _steps(*augment))
    test = datasets.ImageFolder(str(root / "val"), _steps(*fit))
    if train.classes != test.classes:
        raise InputError("train/ and val/ differ in their classes")
    return Images(train, test, len(train.classes), size)


DATASETS = {make.__name__: make for make in (digits, cifar10, imagefolder)}


def _steps(*steps: Any) -> Any:
    as_floats = [transforms.ToImage(), transforms.ToDtype(torch.float32, scale=True)]
    return transforms.Compose([*steps, *as_floats, transforms.Normalize(MEAN, STD)])


def _needed(folder: Path | None) -> Path:
    if folder is None:
        raise InputError("needs --data-dir, the folder it is in (or is put into)")
    return folder.expanduser()
