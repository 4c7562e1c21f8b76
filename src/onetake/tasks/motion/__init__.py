"""The built-in video task: one shape that moves as its caption says, and an exact verifier by tracking."""
