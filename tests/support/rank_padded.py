"""What a rank does with a Llama-like model and padded batches of a user's own loader."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import revcompile
from revcompile import TrainerOptions
from tests.support.architectures import ARCHITECTURES
from tests.support.comparing import Recorder

LENGTHS = (5, 9, 4, 11, 7, 3)


def padded(texts: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = ids != 0
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def loader() -> Any:
    texts: Any = [3 + torch.arange(n) * 7 % 47 for n in LENGTHS]
    return DataLoader(texts, 2, shuffle=True, collate_fn=padded)


def gradient_errors(rank: int, options: dict[str, Any]) -> Any:
    """The shape of each batch, and how far this rank's gradients are from autograd's.

    The learning rate is 0, so that every micro-batch sees the same weights.
    """
    torch.manual_seed(0)
    model: Any = ARCHITECTURES["llama"].build(1).double().train()
    example = next(iter(loader()))
    net = revcompile.petrafy(model, 4, None, example, policy="same_parameters", check="off")
    reference: Any = copy.deepcopy(net.to_module()).train()
    trainer: Any = net.trainer(Recorder, None, seed=1, options=TrainerOptions(timeout=60.0))
    batches = list(trainer.loader(loader()))
    logged = [metrics.scalars() for metrics in trainer.steps(batches)]
    trainer.flush()
    found = []
    for index, batch in enumerate(batches):
        reference.zero_grad()
        reference(**batch).loss.backward()
        wanted = {name: p.grad for name, p in reference.named_parameters()}
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        differences = [
            float((got - wanted[name]).abs().max()) / largest
            for executor in trainer._executors
            for name, got in zip(
                executor.updater.parameters, executor.updater.optimizer.seen[index], strict=True
            )
        ]
        found.append((tuple(batch["input_ids"].shape), len(differences), max(differences)))
    if hasattr(trainer, "close"):
        trainer.close()
    return found, [scalars.get("loss") for scalars in logged]
