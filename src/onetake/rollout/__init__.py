"""One rollout's life: dealt, sampled, scored, checked before the first update, and evaluated on held-out prompts.

Not here: when a gradient is materialised (`execution`), or how updates follow each other (`run`).
"""
