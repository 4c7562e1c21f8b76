"""The built-in image task: coloured shapes on a plain ground, their captions, and an exact verifier."""
