"""Fine-tune reversibly with Lightning: the reversible model is a module like any other.

python examples/finetune_lightning.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from characters import lines, padded, pretrained
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import revcompile


class LanguageModel(lightning.LightningModule):
    """What Lightning needs: the loss of a batch, and the optimizer."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss, logged."""
        loss: Tensor = self.net(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """The loss in eval mode, where the model computes the original's function."""
        self.log("loss", self.net(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimizer of all parameters."""
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Load, make reversible, fine-tune, save; returns the loss before and after."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or folder; without, a small one is trained first")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("out/lightning"))
    args = parser.parse_args(argv)

    model = AutoModelForCausalLM.from_pretrained(args.model or pretrained(args.out, args.steps))
    data: Any = lines()
    net: Any = revcompile.reversify(model, example_kwargs=padded(data[:2]), policy="pretrained")
    net.train()  # from_pretrained gives models in eval mode, and Lightning leaves modes alone

    train = DataLoader(data[:-64], batch_size=8, shuffle=True, collate_fn=padded)
    tests = DataLoader(data[-64:], batch_size=32, collate_fn=padded)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=args.out,
    )
    module = LanguageModel(net)
    before = float(trainer.validate(module, tests, verbose=False)[0]["loss"])
    trainer.fit(module, train)
    after = float(trainer.validate(module, tests, verbose=False)[0]["loss"])
    print(f"loss {before:.3f} -> {after:.3f}")
    net.save_pretrained(args.out)
    return before, after


if __name__ == "__main__":
    main()
