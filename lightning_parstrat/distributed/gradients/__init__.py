"""Operations on reduced gradients before the step, in shards or on every rank."""
