"""What every test runs under: few threads, a fixed seed, deterministic kernels on the CPU."""

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
import torch

from revcompile.compiler.capture.isolation import seed_all
from revcompile.ir import ops

torch.set_num_threads(min(2, torch.get_num_threads()))
gc.set_threshold(100_000, 20, 20)  # little that is imported becomes garbage


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of garbage collection: most of its work, and for nothing.

    Graphs are full of cycles, so that collections are frequent.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 20)


TABLE: Final = 4
"""Tests with more cases than this are products of parameters, or long lists of models."""

NIGHTLY: Final[dict[str, Sequence[str]]] = {
    "test_balance.py::test_no_partition_is_better": ("200", "400"),
    "test_reversible.py::test_gradients_equal_stored_activations": (
        "resnet18",
        "vit_tiny_patch16_224",
        "swin_tiny_patch4_window7_224",
        "convnext_atto",
        "xcit_nano_12_p8_224",
    ),
    "test_reversible.py::test_torch_compile_gives_the_same_gradients": (),
    "compiler/test_capture.py::test_timm": ("test_vit",),
    "compiler/test_families.py": ("test_resnet", "test_vit"),
    "compiler/test_fuzz.py::test_random_nets_are_right_or_refused": ("0-10",),
    "compiler/test_fuzz.py::test_what_was_found_is_right_or_refused": (
        "custom function",
        "dict of an opaque module",
        "complex",
        "in place behind an identity",
        "average within a loop",
        "frozen batch norm",
        "two streams",
        "length",
        "step",
        "layer drop, off and on",
    ),
    "compiler/test_fuzz.py::test_nets_that_outgrow_their_precision_are_stopped": ("11-764",),
    "compiler/test_fuzz.py::test_every_part_is_a_net_that_trains": (),
    "compiler/test_fuzz.py::test_a_net_is_its_repr_and_its_seed": ("0", "1"),
    "compiler/test_lower.py::test_statistics_move_once_a_micro_batch": (),
    "inspect/test_browser.py": (),
    "interop/test_huggingface.py::test_two_layers_at_two_lengths_in_four_stages": ("gpt2",),
    "interop/test_pipelining.py::test_a_schedule_of_torch_trains_as_ours": (),
    "repository/test_docs.py::test_a_command_can_be_given": (),
    "repository/test_docs.py::test_a_tutorial_runs": (),
    "repository/test_docs.py::test_the_code_of_a_page_runs_in_order": (
        "README.md",
        "docs/start.md",
    ),
    "repository/test_examples.py": ("test_train_compiled_learns",),
    "repository/test_models.py": (
        "test_compiled_resnets_are_petras_revnets",
        "test_a_compiled_vit_is_rev_vit",
    ),
    "runtime/distributed/test_distributed.py::test_four_ranks_train_as_one_process": (),
    "runtime/distributed/test_distributed.py::test_a_run_goes_on_in_another_layout": (),
    "runtime/distributed/test_distributed.py::test_training_goes_on_after_a_lost_micro_batch": (
        "petra",
    ),
    "runtime/distributed/test_rank_data.py::"
    "test_padded_batches_of_a_llama_in_four_stages_have_autograd_s_gradients": (),
    "runtime/distributed/test_restart.py": (
        "test_after_a_kill_every_step_is_the_undisturbed_runs[petra]",
        "test_a_kill_in_a_save_leaves_a_whole_checkpoint[no index yet]",
        "test_four_ranks_then_two_then_one_then_a_module",
    ),
    "runtime/executor/test_captured.py::test_a_scaled_loss": ("petra",),
    "runtime/executor/test_captured_tied.py": (),
    "runtime/executor/test_updates.py::test_the_same_updates_as_a_device_takes_them": (),
    "runtime/trainer/test_trainer_state.py::"
    "test_methods_that_keep_graphs_are_saved_after_a_flush": (),
}
"""Files and tests of the nightly run, with what of them is in the core: ids of cases, or tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what repeats a promise of the core with more models, methods or settings.

    Of a product of parameters the core has every value once: a case stays if one of its values has
    not been met before. What else is left to the nightly run is in `NIGHTLY`.
    """
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    met: dict[str, set[tuple[str, Any]]] = defaultdict(set)
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").partition("[")
        file, _, name = test.partition("::")
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        values = {(argument, _key(value)) for argument, value in parameters.items()}
        is_new = bool(values - met[test])
        if test in NIGHTLY:
            in_core = case.removesuffix("]") in NIGHTLY[test]
        elif file in NIGHTLY:
            labels = {name, f"{name}[{case}", case.removesuffix("]")}
            in_core = not labels.isdisjoint(NIGHTLY[file])
        else:
            in_core = is_new or cases[item.nodeid.partition("[")[0]] <= TABLE
        if in_core:
            met[test] |= values
        else:
            item.add_marker("nightly")


def _key(value: Any) -> Any:
    """What tells values of a parameter apart."""
    return value if isinstance(value, str | int | float | None) else repr(value)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed the generators: 0 unless a test says `parametrize("seed", [...], indirect=True)`."""
    value: int = getattr(request, "param", 0)
    seed_all(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)  # `seed_all` leaves out devices that are not in use yet
    return value


@pytest.fixture(autouse=True)
def torch_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Deterministic algorithms, and no test's global settings leak into the next."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    # On a CPU without bf16 instructions the first bf16 matmul switches oneDNN off for good.
    onednn = torch.backends.mkldnn.enabled
    # On CUDA some backward passes have no deterministic kernel and would raise.
    torch.use_deterministic_algorithms(request.node.get_closest_marker("gpu") is None)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn


@pytest.fixture(autouse=True)
def statistics_move_again() -> Iterator[None]:
    """What a test has frozen others would find frozen."""
    yield
    assert not ops.statistics_frozen.get()
