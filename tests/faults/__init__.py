"""Trainings that are killed: what is left of them, how the others end, and how they go on."""
