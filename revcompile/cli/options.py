"""The options of every command. Torch is not imported here, so that --help is fast."""

from __future__ import annotations

import argparse
from typing import Final

from revcompile.cli.units import bandwidth, count, drawing, rate, seconds, shape, size
from revcompile.schedule.methods import METHODS, Weights


def inspect(parser: argparse.ArgumentParser) -> None:
    """List which parts of a model become reversible, and why the rest does not.

    With --stages, show the stages: what each computes, sends and keeps. Exit code 1 if there are
    no --stages and nothing in the model can be made reversible.

    The model is built on the meta device and takes no memory. A model that reads values of tensors
    is built on the CPU instead.
    """
    _add_model(parser)
    _add_stages(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--explain", metavar="PATH", help="how a module was rewired, where it runs")
    what.add_argument("--code", type=int, metavar="STAGE", help="a stage's generated Python")
    what.add_argument("--program", type=int, metavar="STAGE", help="a stage's list of actions")


def measure(parser: argparse.ArgumentParser) -> None:
    """Measure memory and time of plain, checkpointed and reversible training, eager and compiled.

    A step is a forward and a backward pass. Memory is the peak of activations, without parameters,
    gradients and inputs. Checkpointing is that of timm or transformers; other models have no row
    for it. Blocks of plain and checkpointed models are compiled one by one.

    --plot adds reversible training with several values of memory_budget and, compiled, torch's
    activation_memory_budget at 0.1, 0.2, 0.3, 0.5 and 0.7.
    """
    _add_model(parser)
    parser.add_argument("--batch-size", type=count, default=8, metavar="B", help="samples per step")
    parser.add_argument("--device", default="cpu", help="where to measure, e.g. cuda")
    parser.add_argument("--steps", type=count, default=3, help="number of timed steps")
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        help="bf16: autocast (default: bf16 on GPUs, else fp32)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="measure compiled steps, too (default: on GPUs)",
    )
    parser.add_argument(
        "--plot", type=drawing("frontier.svg"), metavar="FILE.svg", help="draw time over memory"
    )


def draw(parser: argparse.ArgumentParser) -> None:
    """Draw a model's stages, or its schedule beside others.

    --out net.svg writes a picture, --out net.html a page with the blocks, graph and code of each
    stage. --schedule timeline.svg writes a timeline of what each stage computes.
    """
    _add_model(parser)
    _add_stages(parser)
    parser.add_argument(
        "--out", type=drawing("net.svg", "net.html"), metavar="FILE", help="net.svg or net.html"
    )
    parser.add_argument(
        "--schedule", type=drawing("timeline.svg"), metavar="FILE", help="timeline.svg"
    )


def plan(parser: argparse.ArgumentParser) -> None:
    """Forecast throughput, memory and delay of PETRA and other methods on a cluster.

    The other methods (data parallel, GPipe, 1F1B, interleaved 1F1B and zero-bubble) train the
    original model, PETRA the rewired one. Precision, optimizer, samples per update and the rule for
    cuts are the same. A device has one stage (interleaved: two). Further devices hold replicas,
    whose gradients are averaged. PETRA has up to three rows: all stages rebuild their activations;
    the last stages keep their graphs, within the memory of 1F1B; the same within the memory of the
    device.

      busy     share of the time in which devices compute
      bubbles  share in which they wait for other stages
      links    additional share in which they wait for messages or averaging
      memory   peak of the device that needs the most
      late     the largest delay of gradients, in updates
    """
    _add_model(parser)
    cluster = parser.add_argument_group("the cluster (defaults: what an H200 reaches)")
    cluster.add_argument("--devices", type=count, required=True, metavar="N", help="how many")
    cluster.add_argument("--link", type=bandwidth, default="100Gbps", help="between two devices")
    cluster.add_argument("--latency", type=seconds, default="10us", help="of a link")
    cluster.add_argument(
        "--flops", type=rate, help="FLOPs per second (default: 400T in bf16, 200T in fp32)"
    )
    cluster.add_argument("--memory-bandwidth", type=rate, default="3.3T", help="bytes per second")
    cluster.add_argument("--memory-budget", type=size, default="141GB", help="memory of a device")
    training = parser.add_argument_group("the training")
    training.add_argument(
        "--microbatch-size", type=count, default=32, help="samples per micro-batch"
    )
    training.add_argument(
        "--stages", type=count, help="stages of a pipeline (default: as many as use all devices)"
    )
    training.add_argument(
        "--accumulation-steps", type=count, help="micro-batches per update (default: 4 per stage)"
    )
    training.add_argument(
        "--in-flight-per-stage",
        type=float,
        help="PETRA's micro-batches in flight for each later stage, 1 or more (default: as many as "
        "links need)",
    )
    training.add_argument(
        "--optimizer",
        choices=("sgd", "adamw"),
        help="sgd (with momentum) or adamw (default: adamw for models with attention, else sgd)",
    )
    training.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        help="bf16: activations and messages in bfloat16, weights and PETRA's streams in float32 "
        "(default: bf16; measured costs are fp32)",
    )
    parser.add_argument(
        "--cost",
        choices=("analytic", "measured"),
        default="analytic",
        help="analytic: from FLOPs and bytes; measured: timed on this machine, in fp32",
    )
    parser.add_argument("--device", default="cpu", help="where to measure, e.g. cuda")
    parser.add_argument(
        "--plot",
        type=drawing("frontier.svg"),
        metavar="FILE.svg",
        help="draw throughput over memory",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a timm or torchvision name (or timm:NAME, torchvision:NAME); hf:TYPE, a model type "
        "of transformers in its default configuration with its head (hf:gpt2); hf:PATH, a "
        "config.json or its folder; or package.module:factory, a function that returns a model or "
        "(model, example inputs), a dict for keyword arguments",
    )
    parser.add_argument(
        "--input",
        type=shape,
        metavar="C,H,W",
        help="shape of one sample (default: the model's own, 3,224,224 for torchvision); for text, "
        "its length",
    )
    parser.add_argument(
        "--policy",
        default="paper",
        choices=("paper", "pretrained", "same_parameters"),
        help="how to rewire",
    )


def _add_stages(parser: argparse.ArgumentParser) -> None:
    """Add the options for stages and method."""
    parser.add_argument("--stages", type=count, metavar="N", help="how many stages to cut it into")
    names = ", ".join(METHODS)
    parser.add_argument("--method", metavar="NAME", help=f"{names} (default: petra)")
    parser.add_argument(
        "--in-flight-per-stage",
        type=float,
        metavar="N",
        help="micro-batches in flight for each later stage, 1 or more (default: the method's)",
    )
    parser.add_argument(
        "--weights", choices=[kind.value for kind in Weights], help="which weights passes use"
    )
    parser.add_argument(
        "--microbatch-size",
        type=count,
        metavar="B",
        help="samples per micro-batch, for sizes of messages and memory",
    )


COMMANDS: Final = {add.__name__: add for add in (inspect, measure, draw, plan)}
"""Functions that add the options of a command; their docstrings are its help."""
