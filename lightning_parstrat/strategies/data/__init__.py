"""Training data. Each rank trains on equally many batches, and a training resumes within an epoch."""
