"""The error for wrong usage of a command."""


class UsageError(Exception):
    """Wrong usage: says what was given, what is allowed, and what to do. Ends the command with exit code 2."""
