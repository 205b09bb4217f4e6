"""Accumulation, clipping and precision around a step, and the code that may read its gradients."""
