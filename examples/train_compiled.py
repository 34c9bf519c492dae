"""Train a compiled model: any of timm's or torchvision's, with PETRA or any other method.

`petrafy` rewires the model's residual blocks into reversible couplings, cuts it into balanced
stages and generates each stage's programs. The trainer runs them in one process or, started by
torchrun, in several. The default is a ResNet-18 of a quarter of the width, in four stages, on
scikit-learn's digits: nothing to download, under a minute on two CPU cores.

    python examples/train_compiled.py
    python examples/train_compiled.py --method 1f1b --accumulation-steps 4
    python examples/train_compiled.py --data cifar10 --data-dir data --model resnet18 --stages 10
    torchrun --nproc-per-node 4 examples/train_compiled.py
"""

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from images import DATASETS, Images
from recipe import OPTIMIZERS, SCHEDULES, paper_recipe, small_resnet18, small_stem
from rich.progress import track
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import revcompile
from revcompile import RevcompileError, Trainer, TrainerOptions
from revcompile.errors import InputError

NEXT = """what to try next:
  another method:         python examples/train_compiled.py --method 1f1b --accumulation-steps 4
  on two processes:       torchrun --nproc-per-node 2 examples/train_compiled.py
  what the compiler did:  revcompile inspect resnet18 --stages 4
  real data:              python examples/train_compiled.py --data cifar10 --data-dir data"""


def main(argv: Sequence[str] | None = None) -> float:
    """Compile, train and test; returns the test accuracy."""
    args = parse_args(argv)
    torch.manual_seed(args.seed)  # the same model on every rank
    try:
        data = DATASETS[args.data](args.data_dir, args.size)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"--data {args.data}: {error}") from error
    example = torch.randn(8, 3, data.size, data.size, device=args.device)
    model = create_model(args, data)
    net = revcompile.petrafy(
        model, args.stages, example, policy=args.policy, microbatch_size=args.batch_size
    )

    copies = max(1, int(os.environ.get("WORLD_SIZE", "1")) // args.stages)
    steps = math.ceil(len(data.train) // copies / args.batch_size)  # type: ignore[arg-type]
    options = {"rate": args.lr, "kind": args.optimizer, "schedule": args.schedule}
    batch = args.batch_size * copies
    recipe = paper_recipe(steps, batch, args.accumulation_steps, args.epochs, **options)
    trainer = net.trainer(
        optimizer=recipe.optimizer,
        lr_schedule=recipe.lr_schedule,
        param_groups=recipe.param_groups,
        loss=F.cross_entropy,
        method=args.method,
        accumulation_steps=args.accumulation_steps,
        autocast=torch.bfloat16 if args.autocast else None,
        backend=args.backend,
        seed=args.seed,
        options=TrainerOptions(in_flight_per_stage=args.in_flight_per_stage),
    )
    shown = trainer.is_last and trainer.replica == 0  # only one rank prints
    if shown:
        net.method = trainer.method
        print(net)
    accuracy = train(trainer, data, steps, shown, args)
    net.save_weights(args.out / "model.safetensors")  # every rank calls it
    if shown:
        print(f"test accuracy {accuracy:.1%}; weights and log are in {args.out}\n{NEXT}")
    return accuracy


def train(trainer: Trainer, data: Images, steps: int, shown: bool, args: Any) -> float:
    """Feed micro-batches epoch by epoch, from wherever the last checkpoint left off."""
    saved, log, signals = args.out / "checkpoints", args.out / "log.jsonl", list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    if args.resume and (saved / "latest").exists():
        trainer.load(saved)
    elif shown:
        args.out.mkdir(parents=True, exist_ok=True)
        log.write_text("")
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    tests = DataLoader(data.test, args.batch_size, **options)
    done, score = trainer.microbatches_seen, 0.0
    for epoch in range(done // steps, args.epochs):
        skip = done - epoch * steps
        loader = trainer.loader(data.train, args.batch_size, epoch=epoch, skip=skip, **options)
        for count, (x, y) in enumerate(track(loader, f"epoch {epoch + 1}", disable=not shown), 1):
            metrics = trainer.step(x, y)
            if count % 10 == 0 and on_any_rank(bool(signals)):
                trainer.save(saved)
                print(f"stopped; the same command with --resume goes on from {args.out}")
                raise SystemExit(128 + signal.SIGTERM)
        done = (epoch + 1) * steps
        if epoch + 1 == args.epochs:
            trainer.flush()
        result = trainer.evaluate(tests, metrics={"accuracy": accuracy})
        train_loss, score = trainer.pop_mean_loss(), result.metrics["accuracy"]
        if shown:
            row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": result.loss}
            row |= {"test_accuracy": score, "images_per_second": metrics.throughput}
            with log.open("a") as file:
                print(json.dumps(row), file=file)
            print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
        trainer.save(saved)
    return score


def on_any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. Every rank calls it, and waits for the slowest."""
    if not distributed.is_initialized():
        return flag
    flags = [False] * distributed.get_world_size()
    distributed.all_gather_object(flags, flag)
    return any(flags)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The share of a batch that is classified correctly."""
    return (logits.argmax(1) == y).float().mean()


def create_model(args: argparse.Namespace, data: Images) -> nn.Module:
    """A model of timm or torchvision for images of this size."""
    name: str = args.model
    if name == small_resnet18.__name__:
        model = small_resnet18(data.classes)
    elif timm.is_model(name):
        model = timm.create_model(name, num_classes=data.classes)
        if resize := getattr(model, "set_input_size", None):  # transformers are built for one size
            resize(img_size=data.size)
    elif name in torchvision.models.list_models():
        model = torchvision.models.get_model(name, num_classes=data.classes)
    else:
        raise InputError(f"--model {args.model}: neither timm nor torchvision has it")
    if data.size <= 32 and args.data != "digits":
        small_stem(model)
    return model.to(args.device).to(memory_format=torch.channels_last)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.description = (__doc__ or "").partition("\n")[0]
    add = parser.add_argument
    add("--model", default=small_resnet18.__name__, help="of timm or torchvision")
    add("--policy", default="paper", help="how to rewire it: paper or pretrained")
    add("--stages", type=int, default=4, help="how many stages to cut it into")
    add("--method", default="petra", help="petra, backprop, 1f1b, pipedream, ...")
    add("--in-flight-per-stage", type=float, help="1 (the default) or more: 2 is the paper's")
    add("--accumulation-steps", type=int, default=1, help="micro-batches per update")
    add("--data", choices=DATASETS, default="digits")
    add("--data-dir", type=Path, help="where the dataset is (or is downloaded to)")
    add("--size", type=int, help="side of the images in pixels; default: the dataset's own")
    add("--batch-size", type=int, default=32, help="samples in a micro-batch")
    add("--workers", type=int, default=0, help="processes that read images")
    add("--epochs", type=int, default=4)
    add("--optimizer", choices=OPTIMIZERS, default="delay-aware-sgd", help="transformers: ...adamw")
    add("--lr", type=float, help="peak rate; default: 0.1 for 256 samples per update, or 5e-4")
    add("--schedule", choices=SCHEDULES, default="steps", help="cosine: delay costs less")
    add("--autocast", action="store_true", help="compute branches in bfloat16")
    add("--backend", default="auto", help="auto, eager, cudagraphs or inductor")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="folder for weights, log and checkpoints; default: in runs/")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs") / f"{args.data}-{args.model}-{args.method}"
    return args


if __name__ == "__main__":
    try:
        main()
    except RevcompileError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
