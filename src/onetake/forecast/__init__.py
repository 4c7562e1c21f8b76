"""What a run would need before it runs: memory phase by phase, and time on other numbers of devices.

Not here: plans of activations, which are measured (`activations`).
"""
