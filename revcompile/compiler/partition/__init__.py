"""partition: segments and costs -> balanced stages, cut where it is legal."""

from revcompile.compiler.partition.partition import assign_contiguous, partition

__all__ = ["assign_contiguous", "partition"]
