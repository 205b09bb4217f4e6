"""Pipelines: a module cut into stages at its blocks, run by the schedules of torch."""
