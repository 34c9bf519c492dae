"""partition: segments and costs -> balanced stages, cut where it is legal."""

from revcompile.compiler.partition.partition import Pieces, assign_contiguous, partition
from revcompile.compiler.partition.pieces import one_stream

__all__ = ["Pieces", "assign_contiguous", "one_stream", "partition"]
