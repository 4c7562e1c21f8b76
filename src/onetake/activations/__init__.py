"""How each block's saved state is kept until its backward: stored, compressed or recomputed (HiLoRe, arXiv 2609.33570).

`recovery.Recovery` is the door; `plan` and `solve` need neither torch nor a model.
"""
