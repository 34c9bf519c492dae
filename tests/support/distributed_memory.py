"""What one rank does in the tests of what a rank holds, in memory and on the disk."""

import functools
import gc
import weakref
from typing import Any

import torch
from distributed_worker import batches, compiled, fed, final, optimizer, outcome, trainer_of
from torch.nn import functional as F
from training import settings_of


def holdings(rank: int, options: dict[str, Any]) -> Any:
    """What is left of the model's parameters here; whether they are found again, and by whom."""
    run, how = options["run"], options.get("trainer", {})
    net, _ = compiled(run.model, run.stages, run.device)
    before = [weakref.ref(parameter) for parameter in net.model.parameters()]
    _, trainer = trainer_of(run, **how)
    peak = torch.cuda.max_memory_allocated() if trainer._placement.device.type == "cuda" else 0
    alive = [p for ref in before if (p := ref()) is not None] + [*net.model.parameters()]
    for executor in trainer._executors:
        alive += executor.stage.parameters.values()
    held = {id(p): p for p in alive if not p.is_meta}
    del before, alive, executor
    for batch in batches(run):
        fed(trainer, batch)
    trainer.flush()
    names = sorted(dict(trainer.named_parameters()))
    state = {name: value.cpu() for name, value in net.to_module().state_dict().items()}
    trainer.close()
    device = trainer._placement.device
    del trainer
    gc.collect()
    again = net.to_module().state_dict()
    other = net.trainer(
        optimizer, F.cross_entropy, **settings_of(**how, stage_to_rank=options["other"])
    )
    for found in (again, final(net, other)):
        assert all(torch.equal(value, found[name].cpu()) for name, value in state.items())
    return {
        "bytes": sum(p.numel() * p.element_size() for p in held.values()),
        "elsewhere": sum(p.device != device for p in held.values()),
        "peak": peak,
        "names": names,
        "state": state,
    }


def absent(rank: int, options: dict[str, Any]) -> Any:
    """Only the first rank has made the weights; and then no rank has, nor those of a new model."""
    run = options["run"]
    net, _ = compiled(run.model, run.stages, run.device)
    if rank > 0:
        net.model.to("meta")
    trainer = net.trainer(optimizer, F.cross_entropy, seed=7)
    for batch in batches(run):
        fed(trainer, batch)
    trainer.flush()
    state, errors = final(net, trainer), []
    for each in (net, compiled(run.model, run.stages - 1, run.device)[0]):
        each.model.to("meta")
        errors.append(outcome(functools.partial(each.trainer, optimizer, F.cross_entropy)))
    return state, errors
