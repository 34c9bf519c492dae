"""The quality of a method's gradients as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.table import Table

from revcompile.inspect.tables import render

__all__ = ["gradient_table"]


class Similarity(Protocol):
    """How alike two gradients are."""

    @property
    def cosine(self) -> float: ...
    @property
    def norm_ratio(self) -> float: ...


class StageGradients(Protocol):
    """One stage's gradients compared."""

    @property
    def stage(self) -> int: ...
    @property
    def delay(self) -> int: ...
    @property
    def method_vs_delayed(self) -> Similarity: ...
    @property
    def method_vs_end_to_end(self) -> Similarity: ...
    @property
    def delayed_vs_end_to_end(self) -> Similarity: ...
    @property
    def sigma(self) -> float: ...


class GradientReport(Protocol):
    """What a trainer's probe reports."""

    @property
    def method(self) -> str: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def stages(self) -> Sequence[StageGradients]: ...
    @property
    def sigma(self) -> float: ...


def gradient_table(report: GradientReport) -> str:
    """Cosine and norm ratio of each two of a stage's gradients, and its sigma."""
    table = Table(title=f"{report.method}, micro-batch {report.microbatch}: cosine (norm ratio)")
    columns = ("stage", "delay", "method : delayed", "method : end-to-end")
    for column in (*columns, "delayed : end-to-end", "sigma"):
        table.add_column(column, justify="right")
    for one in report.stages:
        pairs = (one.method_vs_delayed, one.method_vs_end_to_end, one.delayed_vs_end_to_end)
        cells = (f"{pair.cosine:.4f} ({pair.norm_ratio:.4f})" for pair in pairs)
        table.add_row(str(one.stage), str(one.delay), *cells, f"{one.sigma:.4f}")
    return render(table, f"sigma over all stages: {report.sigma:.4f}")
