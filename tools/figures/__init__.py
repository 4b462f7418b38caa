"""`python -m tools.figures`: the figures of the paper, measured on this engine."""
