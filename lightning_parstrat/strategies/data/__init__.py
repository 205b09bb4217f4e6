"""Training data: equally many batches on every rank, and the place in an epoch from which a training resumes."""
