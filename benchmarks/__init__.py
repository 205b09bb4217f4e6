"""Programs that measure: ``python -m benchmarks.step_time``, from the folder above."""
