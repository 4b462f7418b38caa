"""One decoder for the Llama family: shapes, weights, paged KV, packed forwards. Target and draft share it."""
