"""The same model compiles to the same names, cuts and programs in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from fingerprint import SMALL, compiled, fingerprint
from paths import ROOT

from tests.compiler.test_families import MODELS


def assert_equal_everywhere(names: Sequence[str]) -> None:
    """This process, whatever it did before, compiles as a new one with another hash seed."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-m", "tests.support.fingerprint", *names],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(other.stdout)
    for name in names:
        assert fingerprint(compiled(name, 3)).splitlines() == found[name].splitlines(), name


def test_processes_of_different_hash_seeds_compile_the_same_programs() -> None:
    assert_equal_everywhere(SMALL)


@pytest.mark.slow
def test_all_families_compile_the_same_in_processes_of_different_hash_seeds() -> None:
    assert_equal_everywhere(MODELS)
