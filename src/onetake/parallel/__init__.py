"""Several processes, one update: who samples what (`layout`), what they tell each other (`world`), who holds what (`shard`)."""

from onetake.parallel.layout import Layout, LayoutKind
from onetake.parallel.shard import ParallelConfig
from onetake.parallel.world import ALONE, World, world

__all__ = ["ALONE", "Layout", "LayoutKind", "ParallelConfig", "World", "world"]
