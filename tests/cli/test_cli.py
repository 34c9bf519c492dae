"""The command line: results on stdout, errors on stderr, exit codes, JSON, and help at once."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cases
from nets import Residual, module_of
from torch import Tensor, nn

import revcompile
from revcompile.cli import main, models, units
from revcompile.inspect.tables import render, table_of

MODEL = "test_cli:tiny"
HERE = Path(__file__).parent


def block() -> nn.Module:
    return Residual(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))


def tiny() -> tuple[nn.Module, Tensor]:
    """What `test_cli:tiny` gives: a model and what to call it with."""
    return nn.Sequential(nn.Linear(3, 6), block(), block(), nn.Linear(6, 2)), torch.randn(2, 3)


def unshaped() -> nn.Module:
    return tiny()[0]


def number() -> int:
    return 3


@pytest.fixture(autouse=True)
def among_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factories are looked for from the folder a command is run in."""
    monkeypatch.chdir(HERE)


Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Called:
    """Run a command line: exit code, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(argv)
        except SystemExit as end:  # argparse leaves so
            code = end.code if isinstance(end.code, int) else 1
        out, err = capsys.readouterr()
        return code, out, err

    return call


def in_json(called: Called, *argv: str) -> Any:
    code, out, err = called(*argv, "--json")
    assert code == 0, err
    return json.loads(out)


# -- the whole ------------------------------------------------------------------------------------


def test_help_needs_no_torch() -> None:
    """Importing torch takes seconds, more than anybody waits for help."""
    script = (
        "import sys\nfrom revcompile.cli import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(revcompile.__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0 and "--devices" in ended.stdout


@pytest.mark.parametrize("command", ["", "inspect", "draw", "plan"])
def test_help_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*filter(None, [command]), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_package_has_its_names_although_they_are_imported_late() -> None:
    assert set(revcompile.__all__) <= set(dir(revcompile))
    assert all(getattr(revcompile, name).__doc__ for name in revcompile.__all__)
    with pytest.raises(AttributeError, match="'revcompile' has no attribute 'petraphy'"):
        revcompile.petraphy  # noqa: B018


def test_it_runs_as_a_module() -> None:
    root = Path(revcompile.__file__).parents[1]
    command = [sys.executable, "-m", "revcompile", "--version"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, f"revcompile {revcompile.__version__}\n")


def test_help_lists_every_command_and_the_exit_codes(called: Called) -> None:
    code, out, _ = called("--help")
    assert code == 0 and "exit codes" in out
    for command in ("inspect", "measure", "draw", "plan"):
        assert f"\n    {command}" in out
        assert "--json" in called(command, "--help")[1]


@cases(
    "argv, message",
    (["inspect", "resnt18", "--stages", "2"], "did you mean 'resnet18'"),
    (["inspect", "torchvision:vgg_nine", "--stages", "2"], "no model 'vgg_nine'"),
    (["inspect", MODEL, "--stages", "99"], "inspect: --stages 99, but Sequential has 4 pieces"),
    (["inspect", MODEL, "--stages", "99"], "use --stages <= 4"),
    (["plan", MODEL, "--devices", "2", "--stages", "3"], "plan: --stages 3 on 2 devices"),
    (["measure", MODEL, "--device", "cuda:99"], "measure: --device cuda:99, but torch sees"),
    (["measure", MODEL, "--device", "cuda:99"], "or leave out --device"),
    (["measure", MODEL, "--compile", "--plot", "m.svg"], "use --compile or --plot, not both"),
    (["inspect", MODEL, "--stages", "2", "--method", "petraa"], "did you mean 'petra'"),
    (["inspect", "Qwen/Qwen3-0.6B"], "begin with hf: (hf:Qwen/Qwen3-0.6B)"),
    (["inspect", "hf:Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B config.json"),
    (["inspect", f"hf:{HERE}"], "is not the configuration of a model"),
    (["inspect", MODEL, "--stages", "0"], "'0' is not a whole number from 1 on"),
    (["draw", MODEL], "nothing to draw"),
    (["draw", MODEL, "--out", "net.pdf"], "ends in .pdf; give the file a name that ends in .svg"),
    (["plan", MODEL, "--devices", "2", "--plot", "plan.pdf"], "ends in .pdf"),
    (["plan", MODEL, "--devices", "2", "--plot", "no/plan.svg"], "there is no folder"),
    (["plan", MODEL], "required: --devices (see revcompile plan --help)"),
    (["inspect", "test_cli:nothing", "--stages", "2"], "cannot be imported"),
    (["inspect", "no.such.module:net", "--stages", "2"], "cannot be imported"),
    (["inspect", "test_cli:MODEL", "--stages", "2"], "MODEL() failed with TypeError"),
    (["inspect", "test_cli:number", "--stages", "2"], "returned int"),
    (["inspect", "test_cli:unshaped", "--stages", "2"], "give --input C,H,W"),
    (["inspect", MODEL, "--stages", "2", "--explain", "2.branc"], "did you mean"),
    (["inspect", MODEL, "--stages", "2", "--code", "7"], "there are stages 0 to 1"),
    (["draw", MODEL, "--stages", "2"], "nothing to draw"),
    (["plan", MODEL, "--devices", "2", "--latency", "3"], "'3' is not understood"),
    (["draw", MODEL, "--stages", "2", "--out", "net.png"], "net.png"),
    (["plan", MODEL, "--devices", "4", "--link", "fast"], "'fast' is not understood"),
    (["inspect", MODEL, "--method", "1f1b"], "inspect: --method is about stages"),
    (["inspect", MODEL, "--depth", "3"], "unrecognized arguments: --depth 3"),
    (["plan", MODEL, "--devices", "2", "--link", "0Gbps"], "'0Gbps' is not above 0"),
    (["dance"], "invalid choice"),
    ([], "COMMAND"),
)
def test_what_cannot_be_done_is_reported_on_stderr_without_a_traceback(
    called: Called, argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    code, out, err = called(*argv)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert err.splitlines()[-1].startswith("revcompile")
    assert "usage:" not in err


def test_ctrl_c_is_a_line(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("revcompile.cli.inspect.run", interrupted)
    assert called("inspect", MODEL) == (130, "", "revcompile inspect: stopped\n")


# -- inspect --------------------------------------------------------------------------------------


def test_inspect_prints_the_table_and_its_numbers(called: Called) -> None:
    code, out, _ = called("inspect", MODEL, "--stages", "3", "--microbatch-size", "8")
    assert code == 0 and "Sequential: 3 stages, petra, micro-batches of 8" in out
    found = in_json(called, "inspect", MODEL, "--stages", "3", "--microbatch-size", "8")
    assert [stage["delay"] for stage in found["stages"]] == [2, 1, 0]
    assert found["stages"][-1]["sent_bytes"] == 8 * 2 * 4


def test_inspect_shows_one_stage_one_block_and_another_order(called: Called) -> None:
    cut = (MODEL, "--stages", "3")
    assert "def backward(" in called("inspect", *cut, "--code", "1")[1]
    assert "FORWARD m0" in called("inspect", *cut, "--program", "1")[1]
    assert "(a, b) -> (b, a + F(b))" in called("inspect", *cut, "--explain", "1")[1]
    assert in_json(called, "inspect", *cut, "--program", "2")["actions"][:2] == ["RX0", "F0"]
    paper = in_json(called, "inspect", *cut, "--in-flight-per-stage", "2")
    assert [stage["delay"] for stage in paper["stages"]] == [4, 2, 0]


def test_a_block_and_code_can_be_shown_without_stages(called: Called) -> None:
    assert "def backward(" in called("inspect", MODEL, "--code", "0")[1]
    assert "(a, b) -> (b, a + F(b))" in called("inspect", MODEL, "--explain", "1")[1]


def gated() -> tuple[nn.Module, Tensor]:
    gate = module_of(lambda self, x: 2 * x if x.sum() > 0 else x)
    return nn.Sequential(nn.Linear(3, 6), block(), gate, block()), torch.randn(2, 3)


def test_a_model_that_reads_contents_is_built_on_the_cpu(called: Called) -> None:
    for argv in (("inspect",), ("inspect", "--stages", "2"), ("plan", "--devices", "2")):
        code, out, err = called(*argv, "test_cli:gated")
        assert code == 0 and out, err


# -- without stages -------------------------------------------------------------------------------


def dull() -> nn.Module:
    sides = {"left": nn.Linear(3, 3), "right": nn.Linear(3, 3)}
    return module_of(lambda self, x: self.left(x).tanh() + self.right(x).tanh(), **sides)


def test_inspect_tells_what_was_found_and_what_refused(called: Called) -> None:
    found = in_json(called, "inspect", MODEL)
    assert [s["reversible"] for s in found["segments"]] == [False, True, True, False]
    assert [block["path"] for block in found["found"]] == ["1", "2"]
    code, out, _ = called("inspect", MODEL)
    assert code == 0 and "reversible: 2 blocks" in out


def test_a_model_without_a_reversible_block_ends_in_1(called: Called) -> None:
    code, out, _ = called("inspect", "test_cli:dull", "--input", "3")
    assert code == 1 and "not rewired" in out


def test_measure_compares_plain_with_reversible_training(called: Called) -> None:
    found = in_json(called, "measure", MODEL, "--steps", "1")
    plain, reversible = (found["rows"][name]["bytes"] for name in ("plain", "reversible"))
    assert found["batch_size"] == 8 and plain > 0 and reversible > 0
    code, out, _ = called("measure", MODEL, "--steps", "1")
    assert code == 0 and "a training step with 8 samples on cpu" in out and "█" in out
    assert "peak of activations" in out


def test_measure_draws_time_over_memory(called: Called, tmp_path: Path) -> None:
    file = tmp_path / "frontier.svg"
    found = in_json(called, "measure", MODEL, "--steps", "1", "--plot", str(file))
    names = {"plain", "reversible", "reversible, least", "reversible, all kept"}
    assert names <= {*found["rows"]}
    assert all(f">{name}<" in file.read_text() for name in names)
    assert all(found["rows"][name]["bytes"] > 0 for name in names)


def test_measure_in_bfloat16(called: Called) -> None:
    rows = [
        in_json(called, "measure", MODEL, "--steps", "1", "--precision", p)
        for p in ("bf16", "fp32")
    ]
    low, full = (row["rows"]["plain"]["bytes"] for row in rows)
    assert low != full and rows[0]["precision"] == "bf16"


def wide() -> tuple[nn.Module, Tensor]:
    return nn.Linear(1024, 1024), torch.randn(2, 1024)


@pytest.mark.gpu
def test_measure_on_a_gpu_does_not_count_the_loaded_model(called: Called) -> None:
    found = in_json(called, "measure", "test_cli:wide", "--steps", "1", "--device", "cuda")
    batch = 4 * 8 * 1024
    assert batch <= found["rows"]["plain"]["bytes"] < 2 * 4 * 1024**2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_measure_on_a_gpu_draws_compiled_steps(called: Called, tmp_path: Path) -> None:
    file = tmp_path / "frontier.svg"
    argv = ("measure", "test_vit", "--steps", "1", "--device", "cuda", "--plot", str(file))
    found = in_json(called, *argv)
    names = {"plain, compiled", "checkpointing, compiled", "reversible, compiled", "torch 0.5"}
    assert names <= {*found["rows"]} and found["precision"] == "bf16"
    assert all("failed" in row or row["bytes"] > 0 for row in found["rows"].values())
    assert all(found["rows"][name]["bytes"] > 0 for name in names)
    assert all(f">{name}<" in file.read_text() for name in ("plain", "torch 0.1", "reversible"))


def pair() -> tuple[nn.Module, Any]:
    """A model of two inputs, the second of which masks the first, for two samples."""
    layers = {"block": block(), "out": nn.Linear(6, 2)}
    model = module_of(lambda self, x, mask: self.out(self.block(x) * mask[..., None]), **layers)
    return model, (torch.randn(2, 5, 6), torch.ones(2, 5))


def named() -> tuple[nn.Module, Any]:
    model, (x, mask) = pair()
    return model, {"mask": mask, "x": x}


@pytest.mark.parametrize("factory", ["pair", "named"])
def test_a_batch_size_is_that_of_every_input(factory: str, called: Called) -> None:
    wanted = argparse.Namespace(model=f"test_cli:{factory}", input=None)
    loaded = models.load(wanted, microbatch_size=7, device="cpu")
    inputs = [*(loaded.example or ()), *loaded.kwargs.values()]
    assert [len(tensor) for tensor in inputs] == [7, 7]
    code, _, err = called("measure", f"test_cli:{factory}", "--batch-size", "7", "--steps", "1")
    assert code == 0, err


transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.mark.nightly
@transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, kind, inputs",
    [
        ("gpt2", "GPT2LMHeadModel", {"input_ids", "attention_mask"}),
        ("bert", "BertForMaskedLM", {"input_ids", "attention_mask"}),
        ("vit", "ViTForImageClassification", {"pixel_values"}),
        ("clip", "CLIPModel", {"input_ids", "attention_mask", "pixel_values"}),
        ("t5", "T5ForConditionalGeneration", {"input_ids", "attention_mask", "decoder_input_ids"}),
        ("whisper", "WhisperForConditionalGeneration", {"input_features", "decoder_input_ids"}),
    ],
)
def test_models_of_transformers_have_their_heads_and_inputs(
    name: str, kind: str, inputs: set[str]
) -> None:
    loaded = models.load(argparse.Namespace(model=f"hf:{name}", input=None))
    assert type(loaded.model).__name__ == kind and set(loaded.kwargs) == inputs
    assert all(tensor.is_meta for tensor in (*loaded.model.parameters(), *loaded.kwargs.values()))


@pytest.mark.nightly
@transformers
@pytest.mark.filterwarnings("ignore")
def test_a_configuration_of_transformers_is_read_from_a_file_or_folder(
    called: Called, tmp_path: Path
) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]}
    config |= {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "pad_token_id": 0}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for path in (file, tmp_path):
        found = in_json(called, "inspect", f"hf:{path}", "--input", "16")
        assert found["model"] == "GPT2ForSequenceClassification"
        assert [block["path"] for block in found["found"]] == [
            "transformer.h.0",
            "transformer.h.0",
        ]
    assert "did you mean" in called("inspect", "hf:gtp2")[2]


@pytest.mark.slow
@transformers
@pytest.mark.filterwarnings("ignore")
def test_measure_takes_models_of_transformers_with_their_heads(
    called: Called, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    argv = "measure", f"hf:{tmp_path}", "--batch-size", "3", "--steps", "1"
    found = in_json(called, *argv)
    assert found["batch_size"] == 3
    assert {*found["rows"]} == {"plain", "checkpointing", "reversible"}


@transformers
def test_what_does_not_fit_into_memory_is_not_built(
    called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 1000)
    code, _, err = called("measure", "hf:gpt2")
    assert code == 2 and "its weights take" in err


# -- draw, plan -----------------------------------------------------------------------------------


def test_a_name_is_no_emoji() -> None:
    assert "hf:llama: 8 stages" in render(table_of("hf:llama: 8 stages", {"x" * 30: "left"}))


def test_draw_writes_what_it_is_asked_for(called: Called, tmp_path: Path) -> None:
    files = [tmp_path / "net.svg", tmp_path / "time.svg"]
    argv = ("draw", MODEL, "--stages", "2", "--out", str(files[0]), "--schedule", str(files[1]))
    assert in_json(called, *argv) == {"written": [str(file) for file in files]}
    assert all("<svg" in file.read_text() for file in files)


def test_plan_compares_methods_on_a_cluster(called: Called, tmp_path: Path) -> None:
    file = tmp_path / "frontier.svg"
    argv = ("plan", MODEL, "--devices", "8", "--link", "10Gbps", "--latency", "1ms")
    found = in_json(called, *argv, "--stages", "2", "--microbatch-size", "4", "--plot", str(file))
    methods = [one["method"] for one in found["forecasts"]]
    flushed = ["gpipe", "1f1b", "1f1b, recomputed", "interleaved", "zero-bubble"]
    assert methods[:6] == ["data parallel", *flushed]
    assert "petra" in methods[6] and found["frontier"]
    assert all(f">{method}<" in file.read_text().replace("&#x27;", "'") for method in methods)
    code, out, _ = called(*argv, "--flops", "100T")
    assert code == 0 and "4 stages x 2 on 8 devices" in out and "Recommended: " in out
    said = "assumed: bf16, 100 TFLOPS and 3.3 TB/s of memory; links of 1.25 GB/s and 1000 us;"
    assert said in " ".join(out.split())


def test_a_plan_that_does_not_fit_ends_in_1(called: Called) -> None:
    code, out, _ = called("plan", MODEL, "--devices", "4", "--memory-budget", "10B")
    assert code == 1 and "too much" in out and "Nothing fits: " in out


def test_a_plan_can_be_measured_here(called: Called) -> None:
    argv = ("plan", MODEL, "--devices", "2", "--cost", "measured")
    found = in_json(called, *argv)["forecasts"]
    assert all(one["throughput"] > 0 for one in found)
    assert "costs are measured in fp32" in called(*argv, "--precision", "bf16")[2]


# -- quantities -----------------------------------------------------------------------------------


@cases(
    "read, text",
    (units.bandwidth, "100"),
    (units.bandwidth, "100Gb"),
    (units.seconds, "5 minutes"),
    (units.size, "80 apples"),
    (units.rate, "1.2.3T"),
    (units.count, "-3"),
    (units.shape, "3,x"),
)
def test_quantities_without_a_clear_meaning_are_refused(read: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)
