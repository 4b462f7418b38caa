"""The actor runtime: processes, messages, shared tensors. Empty: each part starts without the rest."""
