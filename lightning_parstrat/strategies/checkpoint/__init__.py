"""Saving and loading of checkpoints, and how training resumes from them."""
