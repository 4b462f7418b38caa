"""`python -m tools.profile`: shows where the time of a run goes. See `tools.profile.command`."""
