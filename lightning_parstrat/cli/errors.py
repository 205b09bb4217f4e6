"""What a user did that cannot be done."""


class UsageError(Exception):
    """Says what came, what is allowed, and what to do; ends the command with exit code 2."""
