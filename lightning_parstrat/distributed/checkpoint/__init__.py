"""Sharded checkpoints: written by all ranks, read at any world size, consolidated into one file."""
