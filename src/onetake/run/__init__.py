"""A run from its recipe to its folder: the loop, the optimizer, averages, checkpoints.

Not here: what happens inside an update; a new kind of one belongs in an axis.
"""
