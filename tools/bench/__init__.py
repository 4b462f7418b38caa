"""`python -m tools.bench`: measures systems in turns, on the same prompts. See `tools.bench.command`."""
