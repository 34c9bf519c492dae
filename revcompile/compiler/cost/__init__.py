"""cost: what each piece of a model costs (FLOPs, work, saved bytes), and what a stage holds."""

from revcompile.compiler.cost.memory import MemoryModel, Workload
from revcompile.compiler.cost.source import CostSource, piece_costs, segment_costs, sum_costs

__all__ = [
    "CostSource",
    "MemoryModel",
    "Workload",
    "piece_costs",
    "segment_costs",
    "sum_costs",
]
