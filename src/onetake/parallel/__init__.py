"""Several processes, one update: who samples what (`layout`), and what the processes tell each other (`world`)."""

from onetake.parallel.layout import Layout, LayoutKind
from onetake.parallel.world import ALONE, World, world

__all__ = ["ALONE", "Layout", "LayoutKind", "World", "world"]
