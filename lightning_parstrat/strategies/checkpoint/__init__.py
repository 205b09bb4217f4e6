"""When checkpoints are saved and loaded, and how training resumes from them."""
