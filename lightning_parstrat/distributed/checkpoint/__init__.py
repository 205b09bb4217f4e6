"""Sharded checkpoints: written by all ranks, read at any world size, made into a full one."""
