"""The front door: each entry a readable list of named passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from revcompile.compiler.capture import capture, make_example
from revcompile.compiler.check import Check, rng_kept
from revcompile.compiler.residual import find
from revcompile.compiler.rewire import rewire
from revcompile.errors import InputError
from revcompile.ir import Policy
from revcompile.runtime.reversible import Reversible


def reversify(model, example_inputs=None, example_kwargs=None, *, policy="paper", check="fast", leaf_modules=(), tolerance=None):
    captured = capture(model, example_inputs, example_kwargs, check=check, leaf_modules=leaf_modules)
    found = find(captured)
    rewired = rewire(captured, found, Policy.named(policy))
    return Reversible(rewired, tolerance)
