"""When checkpoints are saved and loaded, and how training goes on from them."""
