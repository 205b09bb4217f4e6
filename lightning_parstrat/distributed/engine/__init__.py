"""ZeRO-1: buckets, their reductions and all-gathers, and optimizers that step shards."""
