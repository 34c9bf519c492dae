"""Fine-tune reversibly in a loop of your own with Accelerate, on one process or several.

The loader is an ordinary `DataLoader`; Accelerate gives every rank its share of the batches and
averages the gradients.

    python examples/finetune_accelerate.py
    torchrun --nproc-per-node 2 examples/finetune_accelerate.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from characters import lines, padded, pretrained
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import revcompile


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Load, make reversible, fine-tune, save; returns the mean loss of every epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or folder; without, a small one is trained first")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lines", type=int, default=400, help="of text")
    parser.add_argument("--out", type=Path, default=Path("out/accelerated"))
    args = parser.parse_args(argv)

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    folder = args.model or args.out / "pretrained"
    if args.model is None and accelerator.is_main_process:
        pretrained(folder, 20)
    accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained(folder)
    data: Any = lines()[: args.lines]
    net = revcompile.reversify(model, example_kwargs=padded(data[:2]), policy="pretrained")

    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=padded)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    history = []
    for epoch in range(args.epochs):
        losses = []
        for batch in loader:
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        history.append(float(accelerator.reduce(torch.stack(losses).mean(), "mean")))
        accelerator.print(f"epoch {epoch + 1}: loss {history[-1]:.3f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(net).save_pretrained(args.out)
    accelerator.end_training()
    return history


if __name__ == "__main__":
    main()
