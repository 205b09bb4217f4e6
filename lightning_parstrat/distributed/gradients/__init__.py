"""What is done to reduced gradients before the step, wherever they are: in shards or on every rank."""
