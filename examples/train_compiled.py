"""Train a compiled model: any of timm's or torchvision's, with PETRA or any other method.

`petrafy` rewires the model's residual blocks into reversible couplings, cuts it into balanced
stages and generates each stage's programs; the trainer runs them, all in one process or, started by
torchrun, on several. Without options: a ResNet-18 a quarter as wide, in four stages, on
scikit-learn's digits; nothing to download, under a minute on two CPU cores.

    python examples/train_compiled.py
    python examples/train_compiled.py --method 1f1b --accumulation-steps 4
    python examples/train_compiled.py --data cifar10 --data-dir data --model resnet18 --stages 10
    torchrun --nproc-per-node 4 examples/train_compiled.py
"""

import interrupts  # isort: skip

if __name__ == "__main__":
    interrupts.quiet_on_ctrl_c()

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from images import DATASETS, Images
from recipe import OPTIMIZERS, SCHEDULES, paper_recipe, small_resnet18, small_stem
from report import Report
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import revcompile
from revcompile import Trainer, TrainerOptions
from revcompile.errors import InputError, RevcompileError


def main(argv: Sequence[str] | None = None) -> float:
    """Compile, train and test; returns the test accuracy."""
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    data = load_data(args)
    args.batch_size = args.batch_size or data.batch_size
    model = create_model(args, data)
    example = torch.randn(8, 3, data.size, data.size, device=args.device)
    net = revcompile.petrafy(model, args.stages, example_inputs=example, policy=args.policy)

    copies = max(1, int(os.environ.get("WORLD_SIZE", "1")) // args.stages)
    steps = math.ceil(len(data.train) // copies / args.batch_size)  # type: ignore[arg-type]
    recipe = paper_recipe(
        steps,
        args.batch_size * copies,
        args.accumulation_steps,
        args.epochs,
        rate=args.lr,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        kind=args.optimizer,
        schedule=args.schedule,
    )
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
    report = Report(args.out, args.epochs * steps, vars(args), shown=is_reporter(trainer))
    if report.shown:
        net.method = trainer.method
        print(net.summary(args.batch_size))
    accuracy = train(trainer, data, steps, report, args)
    net.save_weights(args.out / "model.safetensors")  # every rank calls it
    report.finish(what_next())
    return accuracy


def train(
    trainer: Trainer, data: Images, steps: int, report: Report, args: argparse.Namespace
) -> float:
    """Feed micro-batches epoch by epoch, from wherever the last checkpoint left off."""
    saved = args.out / "checkpoints"
    if args.resume and saved.exists():
        trainer.load(saved)
        report.go_on()
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    tests = DataLoader(data.test, args.batch_size, **options)
    done, accuracy_ = trainer.microbatches_seen, 0.0
    with report.progress(done):
        for epoch in range(done // steps, args.epochs):
            loader: Iterable[Any] = trainer.loader(
                data.train, args.batch_size, epoch=epoch, skip=done - epoch * steps, **options
            )
            report.begin(epoch)
            start = time.perf_counter()
            if args.checkpoint:
                loader = interrupts.until_stopped(loader, lambda: trainer.save(saved))
            for x, y in loader:
                metrics = trainer.step(x, y)
                if report.shown:
                    report.step(metrics.loss_tensor, metrics.output, y)
            seconds, done = time.perf_counter() - start, (epoch + 1) * steps
            if epoch + 1 == args.epochs:
                trainer.flush()
            result = trainer.evaluate(tests, metrics={"accuracy": accuracy})
            accuracy_ = result.metrics["accuracy"]
            report.end(result.loss, accuracy_, seconds)
            if args.checkpoint:
                trainer.save(saved)
                interrupts.advice = resumes(args)
    return accuracy_


def load_data(args: argparse.Namespace) -> Images:
    """The dataset of the command line; what is wrong with it becomes one line."""
    try:
        return DATASETS[args.data](args.data_dir, args.size)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"--data {args.data}: {error}") from error


def resumes(args: argparse.Namespace) -> str:
    """How to go on with a run that has been saved."""
    return f"the same command with --resume (make: ARGS=--resume) goes on from {args.out}"


def what_next() -> list[tuple[str, str]]:
    """Commands to try after this one, each with what it shows."""
    python = Path(sys.executable)
    beside = f"{python.relative_to(Path.cwd())}" if python.is_relative_to(Path.cwd()) else "python"
    train = "examples/train_compiled.py"
    return [
        ("another method", f"{beside} {train} --method 1f1b --accumulation-steps 4"),
        ("on two processes", f"{beside} -m torch.distributed.run --nproc-per-node 2 {train}"),
        ("what the compiler did", f"{beside} examples/inspect_stages.py"),
        ("real data", f"{beside} {train} --data cifar10 --data-dir data --model resnet18"),
        ("your own model", "docs/start.md"),
    ]


def create_model(args: argparse.Namespace, data: Images) -> nn.Module:
    """A model of timm or torchvision for images of this size."""
    model: nn.Module
    library, _, name = args.model.rpartition(":")
    if name == small_resnet18.__name__:
        model = small_resnet18(data.classes)
    elif library != "torchvision" and timm.is_model(name):
        model = timm.create_model(name, num_classes=data.classes)
        if resize := getattr(model, "set_input_size", None):  # transformers are built for one size
            resize(img_size=data.size)
    elif library != "timm" and name in torchvision.models.list_models():
        model = torchvision.models.get_model(name, num_classes=data.classes)
    else:
        raise InputError(f"--model {args.model}: neither timm nor torchvision has it")
    if args.stem == "small" or (args.stem == "auto" and args.data.startswith("cifar")):
        small_stem(model)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model.to(args.device)


def is_reporter(trainer: Trainer) -> bool:
    """Of several ranks one shows progress: where the losses are."""
    return trainer.is_last and trainer.replica == 0


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The share of a batch that is classified correctly."""
    return (logits.argmax(1) == y).float().mean()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument_group("model").add_argument
    names = "a timm or torchvision (torchvision:NAME) model; small_resnet18 is a quarter as wide"
    add("--model", default=small_resnet18.__name__, help=names)
    add("--policy", default="paper", help="how to rewire it: paper or pretrained")
    add("--stem", choices=("auto", "small", "own"), default="auto", help="small: ResNets at 32 px")
    add("--stages", type=int, default=4, help="how many stages to cut it into")
    add = parser.add_argument_group("method").add_argument
    add("--method", default="petra", help="petra, backprop, 1f1b, pipedream, ...")
    add("--in-flight-per-stage", type=float, help="1 (the default) or more: 2 is the paper's")
    add("--accumulation-steps", type=int, default=1, help="micro-batches to an update")
    add = parser.add_argument_group("data").add_argument
    add("--data", choices=DATASETS, default="digits")
    add("--data-dir", type=Path, help="where the dataset is (or is downloaded to)")
    add("--size", type=int, help="side of the images in pixels; the dataset's own without it")
    add("--batch-size", type=int, help="a micro-batch; 64, and 32 for digits, without it")
    add("--workers", type=int, default=0, help="processes that read images")
    add = parser.add_argument_group("recipe").add_argument
    add("--epochs", type=int, default=4)
    kinds = (
        "delay-aware-...: momentum that looks as far ahead as gradients are late; where there is"
    )
    kinds += " no delay, delay-aware-sgd is sgd. For transformers: delay-aware-adamw"
    add("--optimizer", choices=OPTIMIZERS, default="delay-aware-sgd", help=kinds)
    add("--lr", type=float, help="peak learning rate; 0.1 for 256 samples an update (sgd) or 5e-4")
    add("--schedule", choices=SCHEDULES, default="steps", help="cosine: delay costs less")
    add("--warmup", type=float, help="epochs; a sixth of all, 5 at most, without it")
    add("--weight-decay", type=float, default=5e-4)
    add("--autocast", action="store_true", help="compute branches in bfloat16")
    add("--channels-last", action=argparse.BooleanOptionalAction, default=True)
    add("--backend", default="auto", help="auto, eager, cudagraphs or inductor")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("run").add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="folder for log, picture, checkpoints; runs/... without it")
    often = "save after every epoch, and on Ctrl-C and SIGTERM"
    add("--checkpoint", action=argparse.BooleanOptionalAction, default=True, help=often)
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = parser.parse_args(argv)
    args.out = (
        args.out or Path("runs") / f"{args.data}-{args.model.replace(':', '-')}-{args.method}"
    )
    return args


def run() -> None:
    """The script: errors are a line each, and so is Ctrl-C."""
    try:
        main()
    except RevcompileError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:  # saved after a signal
            interrupts.advice = resumes(parse_args(None))
            interrupts.say_stopped()
        raise


if __name__ == "__main__":
    run()
