"""What every test runs under: few threads, a fixed seed, deterministic kernels on the CPU."""

import gc
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

import pytest
import torch
from _pytest.doctest import DoctestModule

from revcompile.compiler.capture.isolation import seed_all
from revcompile.ir import ops

Collectors = list[pytest.Collector]

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

CORE_METHODS: Final = ("petra", "petra_stashed", "ddg", "backprop", "dni")
"""One of each kind, wherever `method` is a parameter but for those that are about all of them."""

EVERY_METHOD: Final = ("test_equivalence.py", "test_schedule.py")

NIGHTLY: Final[dict[str, Sequence[str]]] = {
    "test_equivalence.py::test_the_rows_of_the_table_differ": ("skips-1",),
    "test_reversible.py::test_gradients_equal_stored_activations": (
        "resnet18",
        "vit_tiny_patch16_224",
    ),
    "test_reversible.py::test_torch_compile_gives_the_same_gradients": (),
    "compiler/test_cost.py::test_flops_are_those_torch_counts": ("resnet18",),
    "compiler/test_determinism.py": (),
    "compiler/test_families.py": ("test_vit",),
    "compiler/test_fuzz.py::test_random_nets_are_right_or_refused": ("0-6",),
    "compiler/test_fuzz.py::test_findings_are_small_and_written": (),
    "compiler/test_rewire.py::test_parameters_and_segments_of_the_paper": ("resnet18-timm",),
    "compiler/test_rewire.py::test_blocks_that_start_as_their_shortcuts_train": ("resnet18",),
    "inspect/test_browser.py": (),
    "interop/test_huggingface.py": (),
    "interop/test_pipelining.py::test_a_schedule_of_torch_trains_as_ours": (),
    "interop/test_pretrained.py": ("test_eval_mode_is_the_original[vit]",),
    "kernels/test_norms.py::test_the_kernels_equal_torch": (),
    "plan/test_accounting.py::test_the_table_of_the_paper": (),
    "plan/test_budget.py::test_training_holds_no_more_than_was_predicted": ("vit-0.5", "vit-1.0"),
    "plan/test_memory.py::test_a_block_adds_nothing": ("conv-same_parameters",),
    "plan/test_stage_memory.py": (
        "test_stages_hold_what_is_accounted[petra-vgg]",
        "test_stages_hold_what_is_accounted[delayed-vit]",
        "test_the_peak_follows_the_accounting[petra-vgg]",
        "test_the_peak_follows_the_accounting[delayed-vit]",
        "test_a_limit_counts_the_batches_that_the_first_stage_keeps",
        "test_captured_steps_keep_what_is_accounted[vgg-torch.bfloat16]",
        "test_the_summary_is_of_the_buffers_it_is_asked_for",
    ),
    "repository/test_docs.py::test_a_command_can_be_given": (),
    "repository/test_docs.py::test_a_tutorial_runs": (),
    "repository/test_docs.py::test_code_of_a_page_runs": ("README.md",),
    "repository/test_docs.py::test_the_recipe_for_signals": (),
    "repository/test_examples.py": (),
    "repository/test_models.py": (
        "test_compiled_resnets_are_petras_revnets[resnet18-train]",
        "test_a_compiled_vit_is_rev_vit[train]",
    ),
    "runtime/distributed/test_distributed.py": (
        "test_two_ranks_train_as_one_process_with_every_method",
        "test_a_lost_micro_batch_changes_nothing",
        "test_others_name_the_rank_that_ended[2-killed-rank 2 (stage 2) is gone]",
        "test_ranks_that_differ_are_refused",
        "test_the_difference_names_the_ranks",
        "test_a_layout_that_does_not_fit_is_refused",
        "test_more_ranks_than_stages_are_copies_of_the_pipeline",
        "test_a_buffer_that_ranks_would_change_apart_is_refused",
    ),
    "runtime/distributed/test_rank_captured.py": ("test_captured_ranks_train_as_one_process",),
    "runtime/distributed/test_rank_checkpoints.py": (
        "test_saving_changes_nothing_and_a_run_goes_on_wherever_its_stages_are",
    ),
    "runtime/distributed/test_rank_data.py": (
        "test_a_target_of_any_form_reaches_the_last_rank",
        "test_a_target_that_cannot_be_used_is_skipped_by_all",
    ),
    "runtime/distributed/test_restart.py": (
        "test_after_a_kill_every_step_is_the_undisturbed_runs[ddg]",
    ),
    "runtime/executor/test_trace.py::test_two_ranks_write_one_trace": (),
    "runtime/executor/test_updates.py::test_the_same_updates_as_a_device_takes_them": (),
    "runtime/executor/test_updates.py::test_the_same_updates_to_the_bit": (
        "nadam-every batch",
        "delay-aware muon-every third batch",
        "error feedback, adamw-every batch",
        "several-every third batch",
    ),
    "runtime/reversible/test_data_parallel.py": (),
    "runtime/reversible/test_original.py::test_timm_reads_what_it_read_of_the_original": (),
    "runtime/reversible/test_overlap.py::test_memory_does_not_grow_with_depth": (),
    "runtime/reversible/test_overlap.py::test_same_gradients_buffers_and_random_state_to_the_bit": (
        "vit_tiny_patch16_224-float32",
        "conv-bfloat16",
    ),
    "runtime/stage/test_kept_graphs.py::test_activations_of_forward_and_the_latest_parameters": (
        "skips-mixed-1-1",
        "words-all-2-3",
    ),
    "runtime/trainer/test_changes.py::test_on_two_ranks": (),
}
"""Files and tests of the nightly run, with what of them is in the core: ids of cases, or tests."""


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, Collectors, Collectors]:
    """Look for examples in docstrings of the package, not of its tests."""
    found = yield
    return [collector for collector in found if not isinstance(collector, DoctestModule)]


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
        method = parameters.get("method")
        if test in NIGHTLY:
            in_core = case.removesuffix("]") in NIGHTLY[test]
        elif file in NIGHTLY:
            labels = {name, f"{name}[{case}", case.removesuffix("]")}  # all cases, or this one
            in_core = not labels.isdisjoint(NIGHTLY[file])
        else:
            in_core = is_new or cases[item.nodeid.partition("[")[0]] <= TABLE
        if isinstance(method, str) and file not in EVERY_METHOD:
            in_core &= method in CORE_METHODS
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
