"""Accumulation, clipping and precision around a step, and who looks at its gradients."""
