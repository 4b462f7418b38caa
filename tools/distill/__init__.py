"""`python -m tools.distill`: makes a draft out of its target. See `tools.distill.command`."""
