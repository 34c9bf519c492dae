"""Inputs and targets of a micro-batch belong together, whatever loader each rank has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed_worker import launch
from rank_data import (
    dataset,
    evaluate,
    evaluate_modes,
    own_loader,
    own_loaders,
    small,
    through_trainer,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from revcompile.runtime.executor.fingerprints import Fingerprint, compared, fingerprint

pytestmark = pytest.mark.filterwarnings("ignore")
GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("loader", "what"),
    [("unseeded", "targets"), ("distributed_sampler", "targets"), ("targets_apart", "inputs")],
)
def test_ranks_that_read_other_samples_are_stopped_before_anything_is_trained(
    tmp_path: Path, loader: str, what: str
) -> None:
    results, codes = launch(tmp_path, 2, own_loader, loader=loader, limit=60)
    assert codes == [0, 0]
    text = f"trainer.step, micro-batch 0: rank 1 (stage 1) was given other {what} than rank 0"
    for kind, (losses, said, unchanged) in zip(("RankError", "InputError"), results, strict=True):
        assert losses == [] and unchanged
        assert said.startswith(kind) and text in said
        assert "DistributedSampler" in said and "trainer.loader(dataset_or_dataloader" in said


def test_ranks_that_agree_on_the_targets_train(tmp_path: Path) -> None:
    """Seeded alike, with inputs that every rank augments in its own way, or only what is needed."""
    loaders = ["seeded", "augmented", "only_what_is_needed"]
    results, codes = launch(tmp_path, 2, own_loaders, loaders=loaders, limit=60)
    assert codes == [0, 0]
    for found in results:
        assert [(len(losses), said) for losses, said, _ in found] == [(5, "")] * 3


def test_a_loader_of_the_users_own_is_the_same_on_ranks_and_in_one_process(tmp_path: Path) -> None:
    names = ["unseeded", "seeded"]
    results, codes = launch(tmp_path, 2, through_trainer, loaders=names, limit=60)
    assert codes == [0, 0]
    expected = through_trainer(0, {"loaders": names})
    assert results[1] == expected
    one, other = expected[0]
    assert len(one) == 5 and one != other  # epochs differ


def test_evaluation_reads_the_same_samples_or_says_so(tmp_path: Path) -> None:
    results, codes = launch(tmp_path, 2, evaluate, limit=60)
    assert codes == [0, 0]
    expected = small().evaluate(DataLoader(dataset(), 3)).loss
    for loss, shuffled, longer, shorter, iterated in results:
        assert loss == iterated == pytest.approx(expected, rel=1e-6)
        assert "evaluation, batch 0: rank 1 (stage 1) was given other targets" in shuffled
        assert "more batches where targets are needed" in longer
        assert "ends after 3 batches where targets are needed" in shorter


def test_ranks_evaluate_unless_eval_mode_has_other_operations(tmp_path: Path) -> None:
    results, codes = launch(tmp_path, 2, evaluate_modes, limit=60)
    assert codes == [0, 0]
    alone = evaluate_modes(0, {})
    assert all(isinstance(loss, float) for loss in alone)
    for same, other in results:
        assert same == alone[0]
        assert "Modes computes something else in eval mode than in training" in other


# -- fingerprints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randint(0, 2, (16,), generator=GENERATOR),
        torch.randint(0, 2, (4096,), generator=GENERATOR),
        torch.randn(6, 3, 32, 32, generator=GENERATOR),
        torch.randn(6, 3, 32, 32, dtype=torch.complex64, generator=GENERATOR),
        torch.rand(100, 50, 40, generator=GENERATOR) > 0.5,
        torch.randn(6, 3, 32, 32, generator=GENERATOR).half(),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_a_fingerprint_depends_on_values_types_and_order(tensor: Tensor) -> None:
    assert not torch.equal(tensor, tensor.flip(0))
    mine = fingerprint(tensor, 0)
    assert 0 < mine < 2**63
    assert fingerprint({"a": tensor.clone()}, 0) == mine
    if tensor.dim() == 4:
        assert fingerprint(tensor.to(memory_format=torch.channels_last), 0) == mine
    others = [tensor.flip(0), tensor[:-1], tensor.to(torch.float64), [tensor, tensor]]
    assert len({mine, *(fingerprint(other, 0) for other in others)}) == 5


def test_what_cannot_be_compared_is_not() -> None:
    x, y = torch.randn(3, 2), torch.tensor([1, 2, 3])
    with_target, without = Fingerprint.of(x, y, 0), Fingerprint.of(x, None, 0)
    assert compared(with_target, None, y, 0) is None
    assert compared(with_target, x + 1, y, 0) is None  # augmented otherwise
    assert compared(with_target, x, y + 1, 0) == "targets"
    assert compared(without, x, y + 1, 0) is None
    assert compared(without, x + 1, y, 0) == "inputs"
    assert compared(without, None, y, 0) is None
    assert compared(with_target, x, None, 0) is None  # the loss has no target
    assert Fingerprint.of(None, None, 0) == Fingerprint()
    assert fingerprint(nn.Module(), 0) > 0  # nothing is known of it but that it is there
