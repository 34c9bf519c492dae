"""Checkpoints on disk: exact, never half of one, readable without trusting them."""

import functools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import safetensors.torch
import torch
import training
from distributed_worker import launch
from helpers import refuses
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.utils import _pytree as pytree
from training import Net, adam, batches, feed, fresh, momentum, same, seeded, trainer_of, weights

import revcompile
from revcompile.errors import InputError
from revcompile.runtime.checkpoint.folder import Checkpoint, find_checkpoint, save_checkpoint
from revcompile.runtime.checkpoint.training import load_weights, merged_state
from revcompile.runtime.checkpoint.tree import encode_tree

RUNS: Final[dict[str, dict[str, Any]]] = {
    "petra": {"optimizer": adam, "accumulation_steps": 3},
    "petra, the paper's order": {"in_flight_per_stage": 2, "optimizer": momentum},
    "stashed weights": {"method": "pipedream", "optimizer": momentum},
    "gradient predictors": {"method": "dni", "optimizer": adam},
}


def started(run: str, seed: int = 3) -> Any:
    """A trainer of a model with batch norm, dropout and a tied layer."""
    return trainer_of(fresh(), **RUNS[run], lr_schedule=training.SCHEDULES["one cycle"], seed=seed)


def drawn(count: int) -> list[training.Batch]:
    """Micro-batches from the global generators, as a shuffling loader draws them."""
    sizes = [random.choice((3, 4)) for _ in range(count)]
    return [
        (torch.randn(size, 5, dtype=torch.float64), torch.randint(0, 3, (size,))) for size in sizes
    ]


def in_order(tree: Any) -> Any:
    """Entries sorted by name: their order is not part of a state."""
    if isinstance(tree, Mapping):
        return {key: in_order(tree[key]) for key in sorted(tree, key=str)}
    if isinstance(tree, list | tuple):
        return type(tree)(map(in_order, tree))
    return tree


def equal_states(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """To the bit; messages between different stages have no order."""
    states = []
    for state in (a, b):
        kept = {key: value for key, value in state.items() if key != "rng"}
        kept["stages"] = {
            index: stage | {"messages": sorted(stage["messages"], key=lambda message: message[:3])}
            for index, stage in state["stages"].items()
        }
        states.append(in_order(kept))
    return same(*states)


def state_in(folder: Path) -> dict[str, Any]:
    """The state in the newest checkpoint."""
    checkpoint = Checkpoint(find_checkpoint(folder))
    state: dict[str, Any] = checkpoint.read(merged_state(checkpoint))
    return state


# -- going on -------------------------------------------------------------------------------------


def resume(rank: int, options: dict[str, Any]) -> dict[str, list[str]]:
    """In a new process: load each run, go on, save how it ended."""
    folder, found = options["place"], {}
    for run in RUNS:
        trainer = started(run, seed=8)
        feed(trainer, batches(2, seed=9))  # something else is in flight, and is forgotten
        trainer.load(folder / run)
        found[run] = [loss.hex() for loss in feed(trainer, drawn(5))]
        trainer.save(folder / run / "end")
    return found


def test_a_run_resumed_in_a_new_process_is_the_uninterrupted_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # as in the other process: sums depend on it
    expected, ends = {}, {}
    for run in RUNS:
        trainer = started(run)
        feed(trainer, drawn(8))
        trainer.save(tmp_path / run)
        expected[run] = [loss.hex() for loss in feed(trainer, drawn(5))]
        ends[run] = trainer.state_dict()
    assert launch(tmp_path, 1, resume, place=tmp_path) == [expected]
    for run, end in ends.items():
        assert equal_states(state_in(tmp_path / run / "end"), end), run


def test_a_drained_checkpoint_moves_to_other_stages_methods_and_modules(tmp_path: Path) -> None:
    """4 stages to 2, to another method, to the plain modules."""
    data = batches(3, seed=5)
    four = trainer_of(fresh(Net, 4), adam)
    feed(four, batches(6))
    four.save(tmp_path / "four", drain=True)
    expected = four.evaluate(data)

    two = trainer_of(fresh(Net, 2), adam, method="pipedream")
    two.load(tmp_path / "four")
    assert two._schedule.updates == (6, 6)
    assert two.evaluate(data) == expected
    two.save(tmp_path / "two")

    net = fresh(Net, 3)
    net.load_weights(tmp_path / "two")
    assert same(weights(net), four.state_dict()["model"])
    plain = revcompile.reversify(seeded(Net), torch.zeros(4, 5, dtype=torch.float64), check="off")
    for module in (net.to_module(), plain):
        module.load_state_dict(load_weights(tmp_path / "two"))
        output = module.eval()(torch.cat([x for x, _ in data]))
        loss = nn.functional.cross_entropy(output, torch.cat([y for _, y in data]))
        assert float(loss.detach()) == pytest.approx(expected.loss, rel=1e-12)


# -- the folder -----------------------------------------------------------------------------------


def content(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), float(step))}, "step": step}


def put(folder: Path, step: int, **options: Any) -> Path:
    return save_checkpoint(folder, content(step), step=step, **options)


def step_in(folder: Path) -> int:
    """The step of the checkpoint that would be loaded, seen to be whole."""
    checkpoint = Checkpoint(find_checkpoint(folder))
    assert same(checkpoint.read(checkpoint.trees()), [content(checkpoint.step)])
    return checkpoint.step


def test_the_newest_checkpoints_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 5: a run that continued from an earlier one
    for step, clock in ((10, 5e8), (20, 4e8), (30, 9e8), (5, 1e8)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        saved = put(tmp_path, step)
        os.utime(saved, (clock, clock))
        assert saved == find_checkpoint(tmp_path)
        assert step_in(tmp_path) == step
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step_00000005",
        "step_00000030",
    ]
    put(tmp_path, 40, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000040"]
    refuses(InputError, "keep_last=0", put, tmp_path, 50, keep_last=0)


def test_a_step_can_be_saved_twice(tmp_path: Path) -> None:
    trainer = trainer_of(fresh())
    feed(trainer, batches(3))
    first = trainer.save(tmp_path)
    second = trainer.save(tmp_path, drain=True)
    assert (first.name, second.name) == ("step_00000003", "step_00000003_2")
    assert (tmp_path / "latest").read_text() == "step_00000003_2\n"
    trainer_of(fresh(Net, 2)).load(tmp_path)  # nothing is in flight in the second one
    again = trainer_of(fresh())
    again.load(first)
    assert again._schedule.outstanding[0]


class Interrupted(BaseException):
    """What a save dies of in a test."""


def die_in_a_save(folder: Path, moment: int, kill: bool) -> bool:
    """Save, and die at so many operations on files in the folder; were there as many?"""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        touches = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if touches and str(arguments[0]).startswith(str(folder)):
            seen += 1
            if seen == moment and kill:
                os.kill(os.getpid(), signal.SIGKILL)
            elif seen == moment:
                raise Interrupted

    sys.addaudithook(watch)  # stays for the life of the process, so it needs one of its own
    put(folder, 3, keep_last=1)
    return seen >= moment


def die_everywhere(rank: int, options: dict[str, Any]) -> list[str]:
    """Let a save die at every moment: how each ended, and which step is loaded then."""
    folder = options["place"]
    os.fsync = lambda descriptor: None  # slow, and of no use to a process that dies alone
    put(folder / "before", 1)
    put(folder / "before", 2)
    report: list[str] = []
    for kill in (True, False):
        for moment in range(1, 100):
            place = folder / f"{kill}{moment}"
            shutil.copytree(folder / "before", place)
            child = os.fork()
            if not child:
                try:
                    os._exit(2 if die_in_a_save(place, moment, kill) else 3)
                except Interrupted:
                    os._exit(4)
                finally:
                    os._exit(5)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            how = {-signal.SIGKILL: "killed", 2: "went on", 3: "whole", 4: "raised"}[ended]
            report.append(f"{how} {step_in(place)}")
            for path in place.glob("step_*"):
                assert path.suffix == ".tmp" or Checkpoint(path).trees()  # else it raises
            put(place, 4)
            assert step_in(place) == 4
            assert len(list(place.iterdir())) == 3  # two checkpoints, `latest`, no rubbish
            if how == "whole":
                break
    return report


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_save_that_dies_leaves_the_previous_checkpoint_whole(tmp_path: Path) -> None:
    (report,) = launch(tmp_path, 1, die_everywhere, place=tmp_path / "saved")
    for how in ("killed", "raised"):
        found = [line for line in report if line.startswith(how)]
        # The old one, and from the moment that `latest` names it on the new one.
        assert found == sorted(found)
        assert set(found) == {f"{how} 2", f"{how} 3"}
        assert found.count(f"{how} 2") >= 8
    others = {line for line in report if not line.startswith(("killed", "raised"))}
    assert others <= {"whole 3", "went on 3"}  # what cannot be removed does not matter
    assert report.count("whole 3") == 2


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    place, noticed = put(tmp_path, 3), 0
    for file in sorted(place.iterdir()):
        content = file.read_bytes()
        for at in range(0, len(content), 7):
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            file.write_bytes(changed)
            try:
                assert step_in(place) == 3  # else in white space
            except InputError:
                noticed += 1
        file.write_bytes(content)
    assert step_in(place) == 3 and noticed > 90


DAMAGES: Final[dict[str, Callable[[Path, Path], Any]]] = {
    r"rank_00000.safetensors: expected \d+ bytes, got 100": lambda f, i: os.truncate(f, 100),
    "rank_00000.safetensors: it is not what was written": lambda f, i: f.write_bytes(
        b"\xff" * f.stat().st_size
    ),
    "rank_00000.safetensors: .*No such file": lambda f, i: f.unlink(),
    "checkpoint.json: ": lambda f, i: i.write_text('{"format"'),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_damage_is_named(tmp_path: Path, said: str) -> None:
    older, newer = put(tmp_path, 1), put(tmp_path, 2)
    DAMAGES[said](newer / "rank_00000.safetensors", newer / "checkpoint.json")
    refuses(InputError, f"step_00000002 cannot be used: {said}.*_00000001", step_in, tmp_path)
    assert Checkpoint(find_checkpoint(older)).step == 1
    shutil.rmtree(newer)
    assert step_in(tmp_path) == 1


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(fresh())
    refuses(InputError, r"there is no folder .*nowhere", trainer.load, tmp_path / "nowhere")
    refuses(InputError, "there is no whole checkpoint in", trainer.load, tmp_path)
    (tmp_path / "saving_0.tmp").mkdir()
    refuses(InputError, "a save began there and did not finish", trainer.load, tmp_path)
    with pytest.raises(InputError, match=r"nothing.safetensors cannot be read"):
        load_weights(tmp_path / "nothing.safetensors")
    index = trainer.save(tmp_path) / "checkpoint.json"
    content = json.loads(index.read_text())
    for change, said in [
        ({"version": 4}, r"format version 4, but this revcompile reads 3; .* that saved it"),
        ({"format": "other"}, "was not written by trainer.save"),
    ]:
        index.write_text(json.dumps(content | change))
        refuses(InputError, said, trainer.load, tmp_path)


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    trainer_of(fresh(training.Plain)).save(tmp_path / "plain")
    trainer_of(fresh(), adam).save(tmp_path / "adam")
    net = fresh()
    trainer = trainer_of(net)
    feed(trainer, batches(2))
    before = trainer.state_dict()
    for folder, said in [
        ("plain", "it lacks first.weight; it lacks first.bias; .*; and [0-9]+ more"),
        ("adam", "stage 0 has torch.optim.sgd.SGD, but the state is of another optimizer"),
    ]:
        with pytest.raises(InputError, match=f"trainer.load: .*step_00000000: .*{said}"):
            trainer.load(tmp_path / folder)
    with pytest.raises(
        InputError, match=r"net.load_weights: .* holds another model: it lacks first.weight"
    ):
        net.load_weights(tmp_path / "plain")
    assert same(trainer.state_dict(), before)


# -- several ranks --------------------------------------------------------------------------------


Gather = Callable[[Any], list[Any]]


def run_ranks(world: int, work: Callable[[int, Gather], Any]) -> list[Any]:
    """Every rank in a thread of its own; what each returned or raised."""
    barrier = threading.Barrier(world, timeout=30)
    found: list[Any] = [None] * world
    values: list[Any] = [None] * world

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            values[rank] = json.loads(json.dumps(value))
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        try:
            found[rank] = work(rank, gather)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_when_one_rank_fails_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(step: int, rank: int, gather: Gather) -> Path:
        tree = {"model": {f"{rank}": torch.ones(3)}}
        return save_checkpoint(tmp_path, tree, step=step, rank=rank, gather=gather)

    assert set(run_ranks(3, functools.partial(save, 1))) == {tmp_path / "step_00000001"}
    write = safetensors.torch.save_file

    def full_at_rank_1(tensors: Any, file: Path, *rest: Any) -> None:
        if "rank_00001" in file.name:
            raise OSError("No space left on device")
        write(tensors, file, *rest)

    for step in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(safetensors.torch, "save_file", full_at_rank_1)
            errors = run_ranks(3, functools.partial(save, step))
        for error in errors:
            assert "trainer.save: rank 1: OSError: No space left on device" in str(error)
            assert "as before" in str(error)
    checkpoint = Checkpoint(find_checkpoint(tmp_path))
    assert checkpoint.step == 1
    assert len(checkpoint.trees()) == 3


# -- what is in the files -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_all_of_it(tmp_path: Path) -> None:
    trainer = trainer_of(fresh(), adam)
    feed(trainer, batches(4))
    state, saved = trainer.state_dict(), trainer.save(tmp_path)
    # Further names of a tensor are in the JSON alone.
    model = {n: t for n, t in state["model"].items() if not n.startswith("blocks.3.up.")}
    expected = {"model": model, "optimizer": state["optimizer"]}
    assert expected["optimizer"]["head.bias"]["step"] == 4
    found = pytree.tree_map(torch.zeros_like, expected)
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(saved)), no_dist=True)  # type: ignore[attr-defined]
    assert same(found, expected)


def test_an_export_holds_tied_tensors_once_and_loads_anywhere(tmp_path: Path) -> None:
    net = fresh()
    feed(trainer_of(net), batches(3))
    file = net.save_weights(tmp_path / "new" / "net.safetensors")
    assert [path.name for path in file.parent.iterdir()] == ["net.safetensors"]
    stored = safetensors.torch.load_file(file)
    tied = {"blocks.3.up.weight", "blocks.3.up.bias"}
    assert stored.keys() == weights(net).keys() - tied
    other = fresh().to_module()
    safetensors.torch.load_model(other, file)
    again = fresh(Net, 2)
    again.load_weights(file)
    for state in (other.state_dict(), weights(again), load_weights(file)):
        assert same(in_order(dict(state)), in_order(weights(net)))
    refuses(InputError, r"net.pt; name the file", net.save_weights, tmp_path / "net.pt")


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    """Layout in memory too: kernels round differently for another one."""
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree = {
        "images": images,
        "transposed": [torch.randn(3, 4).t(), torch.randn(3)],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "sizes": (torch.Size([2, 3]), (1, [True, None]), torch.bfloat16),
        3: {"numbers": [0.1, float("inf"), 1e-300, -0.0, 10**20]},
    }
    checkpoint = Checkpoint(save_checkpoint(tmp_path, tree, step=0))
    (found,) = checkpoint.read(checkpoint.trees())
    assert same(found, tree)
    assert repr(found[3]) == repr(tree[3])
    assert type(found["sizes"][0]) is torch.Size
    assert found["images"].stride() == images.stride()
    assert found["transposed"][0].stride() == (1, 4)


def test_what_a_file_cannot_hold_is_refused_when_saving(tmp_path: Path) -> None:
    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        return [{"params": [p for _, p in named], "callback": print}]

    trainer = trainer_of(fresh(), param_groups=groups)
    with pytest.raises(InputError, match=r"stages\.0\.groups\.0\.callback: .* cannot be saved"):
        trainer.save(tmp_path)
    with pytest.raises(InputError, match=r"two tensors would be saved as 'a.b'"):
        encode_tree({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(InputError, match=r"trainer.save: .*bits8"):
        save_checkpoint(tmp_path, [torch.zeros(1).to(torch.uint8).view(torch.bits8)], step=0)
