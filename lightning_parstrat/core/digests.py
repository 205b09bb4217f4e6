"""One number for a value, by which ranks compare what they have."""

import hashlib


def digest(value: object) -> int:
    """A number of 61 bits that differs (but for chance) where values do, and is the same in all processes.

    Ranks compare it and its negative as int64, with room for numbers that stand for nothing. Not ``hash()``: Python
    seeds that of strings differently in each process.

    Args:
        value: Bytes, or anything whose ``repr`` says all that is compared.
    """
    content = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 3
