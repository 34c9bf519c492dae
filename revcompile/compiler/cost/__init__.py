"""cost: what each piece of a model costs: FLOPs, work, saved bytes; and what a stage holds."""

from revcompile.compiler.cost.choose import How, costs, piece_costs, sum_costs
from revcompile.compiler.cost.memory import MemoryModel, StageMemory, stage_memory

__all__ = [
    "How",
    "MemoryModel",
    "StageMemory",
    "costs",
    "piece_costs",
    "stage_memory",
    "sum_costs",
]
