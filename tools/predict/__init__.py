"""`python -m tools.predict`: compares policies of outcome prediction. See `tools.predict.command`."""
