"""Training data: equally many batches on every rank, and the place in an epoch where a training goes on."""
