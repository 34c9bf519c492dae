"""partition: segments and costs -> balanced stages, cut where it is legal."""

from revcompile.compiler.partition.partition import Limits, partition

__all__ = ["Limits", "partition"]
