"""Reversible models in the loops that people use: trainers in bfloat16 that evaluate and save."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from helpers import ON_GPU
from torch import Tensor, nn

import revcompile
from revcompile.compiler.recapture import Recompiler
from revcompile.errors import RevcompileWarning

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICES: Final = ["cpu", pytest.param("cuda", marks=ON_GPU)]
VOCABULARY: Final = 60


def build(name: str, layers: int = 2) -> Any:
    """A small model for classification (BERT) or language."""
    import transformers as hf

    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    match name:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=1))
        case "qwen3":
            heads = {"num_key_value_heads": 1, "head_dim": 16}
            return hf.Qwen3ForCausalLM(hf.Qwen3Config(**small, **heads))
        case "gpt2":
            sizes: Any = {"n_embd": 32, "n_layer": layers, "n_head": 2, "n_positions": 64}
            dropped: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            config = hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropped)
            return hf.GPT2LMHeadModel(config)
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(**small, **dropped))


def data(samples: int) -> list[dict[str, Tensor]]:
    """Sequences that count upwards from a random token: easy to learn."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCABULARY, (samples, 1), generator=generator)
    ids = 1 + (starts + torch.arange(16)) % (VOCABULARY - 1)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


@contextmanager
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Collects the number of couplings of each capture after the first."""
    found: list[Any] = []
    again = Recompiler.__call__

    def noted(self: Recompiler, *args: Any) -> Any:
        rewired = again(self, *args)
        found.append(len(rewired.couplings))
        return rewired

    with monkeypatch.context() as patch:
        patch.setattr(Recompiler, "__call__", noted)
        yield found


def saved(net: nn.Module, call: dict[str, Any]) -> int:
    """The bytes that autograd holds for a training step in bfloat16, parameters left out."""
    held: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    device = next(net.parameters()).device

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    call = {name: value.to(device) for name, value in call.items()}
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast(device.type, torch.bfloat16):
        kept = net.train()(**call)
    assert kept.loss.isfinite()
    return sum(held.values())


def trained(
    model: Any, device: str, steps: int, out: Path, **options: Any
) -> tuple[list[float], list[float], float]:
    """Train with the Trainer in bfloat16.

    Returns the logged losses, those of evaluations before and after, and the seconds of a step.
    """
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        bf16=True,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=max(1, steps // 3),
        save_strategy="steps",
        save_steps=max(1, steps // 3),
        logging_steps=1,
        report_to="none",
        use_cpu=device == "cpu",
        disable_tqdm=True,
        seed=0,
        **options,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=data(64), eval_dataset=data(10))
    evaluated = [trainer.evaluate()["eval_loss"]]
    started = time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - started) / steps
    evaluated.append(trainer.evaluate()["eval_loss"])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(str(out / "final"))
    return losses, evaluated, seconds


def batch(samples: int = 4) -> dict[str, Tensor]:
    return {
        key: torch.stack([row[key] for row in data(samples)]) for key in ("input_ids", "labels")
    }


def compare(name: str, device: str, steps: int, out: Path, patch: pytest.MonkeyPatch) -> None:
    """Train a plain and a reversible model alike, and reload what was saved."""
    plain, model = build(name), build(name)
    net: Any = revcompile.reversify(model, example_kwargs=batch(), policy="pretrained").to(device)
    before = saved(net, batch())
    assert before < 0.6 * saved(model.to(device), batch())
    expected, at_first, plain_seconds = trained(plain, device, steps, out / "plain")
    with captures(patch) as found:
        losses, evaluated, seconds = trained(net, device, steps, out / "net")
    print(f"{name}, {device}: {seconds:.3f} s per step, plain {plain_seconds:.3f} s")
    assert found == [len(net.rewired.couplings)]  # one case more, for `num_items_in_batch`
    assert len(losses) == len(expected) == steps
    tail = max(1, steps // 10)
    last, wanted = (sum(each[-tail:]) / tail for each in (losses, expected))
    assert abs(last - wanted) < 0.1 * max(1.0, wanted)
    torch.testing.assert_close(evaluated[0], at_first[0], atol=0.02, rtol=0)
    assert saved(net, batch()) == before
    again = type(model).from_pretrained(out / "net" / "final").to(device).eval()
    inputs = {key: value.to(device) for key, value in batch().items()}
    with torch.no_grad():
        have, want = (
            again(**inputs).logits,
            net.eval()(**inputs).logits,
        )  # in bfloat16, by accelerate
    torch.testing.assert_close(have, want, atol=0.05, rtol=0.05)


def test_the_trainer_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare("llama", "cpu", 2, tmp_path, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert"])
def test_a_hundred_steps_of_the_trainer_in_bfloat16(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, device, 100, tmp_path, monkeypatch)


@pytest.mark.nightly
def test_checkpointing_asked_of_the_trainer_has_no_effect(tmp_path: Path) -> None:
    net: Any = revcompile.reversify(build("llama"), example_kwargs=batch(), policy="pretrained")
    before = saved(net, batch())
    with pytest.warns(RevcompileWarning, match="checkpointing_enable has no effect"):
        trained(net, "cpu", 1, tmp_path, gradient_checkpointing=True)
    assert saved(net, batch()) == before


# -- other loops ----------------------------------------------------------------------------------


def batches() -> list[dict[str, Tensor]]:
    """Two batches of four, and a last one of one."""
    rows = batch(9)
    return [{key: value[i : i + 4] for key, value in rows.items()} for i in (0, 4, 8)]


def with_accelerate(net: nn.Module, compiles: bool = False) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    AcceleratorState._reset_state(reset_partial_state=True)  # one for all accelerators
    plugin = TorchDynamoPlugin(backend="aot_eager" if compiles else "no")
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2, dynamo_plugin=plugin
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    prepared, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    for step in batches():
        with accelerator.accumulate(prepared):
            accelerator.backward(loss := prepared(**step).loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    return losses


def with_lightning(net: nn.Module, compiles: bool = False) -> list[float]:
    lightning = pytest.importorskip("lightning")
    losses = []

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, step: Any) -> Any:
            loss = self.net(**step).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_epochs=1,
        enable_checkpointing=False,
        **quiet,
    )
    module = torch.compile(Module(), backend="aot_eager") if compiles else Module()
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return losses


def with_averaged_weights(net: nn.Module) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in batches():
        with torch.autocast("cpu", torch.bfloat16):
            net.train()(**step).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(net)
        averaged.eval(), net.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert averaged(**step).loss.isfinite()


@pytest.mark.nightly
@pytest.mark.parametrize("loop", [with_accelerate, with_lightning, with_averaged_weights])
def test_other_loops_in_bfloat16(loop: Callable[[nn.Module], Any]) -> None:
    net: Any = revcompile.reversify(build("llama"), example_kwargs=batch(), policy="pretrained")
    net.train()
    full, single = saved(net, batch()), saved(net, batch(1))
    cases = len(net._cases._cases)
    loop(net)
    assert len(net._cases._cases) == cases == 2
    assert (saved(net, batch()), saved(net, batch(1))) == (full, single)
    assert single < full / 2


@pytest.mark.nightly
def test_torch_compile_of_the_trainer(tmp_path: Path) -> None:
    options: Any = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    found = []
    for way, given in (("eager", {}), ("compiled", options)):
        net: Any = revcompile.reversify(
            build("llama"), example_kwargs=batch(), policy="same_parameters"
        )
        found.append(trained(net, "cpu", 6, tmp_path / way, **given)[:2])
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("loop", [with_accelerate, with_lightning])
def test_other_loops_compiled(loop: Callable[[nn.Module, bool], list[float]]) -> None:
    found = []
    for compiles in (False, True):
        net: Any = revcompile.reversify(
            build("llama"), example_kwargs=batch(), policy="same_parameters"
        )
        found.append(loop(net.train(), compiles))
        assert ("compiled by aot_eager" in repr(net)) is compiles
        assert "failed" not in repr(net)
    assert len(found[0]) == 3
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=0)
