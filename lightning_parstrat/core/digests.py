"""One number for a value, by which ranks compare what they have."""

import hashlib


def digest(value: object) -> int:
    """A number of 61 bits, the same in all processes. If two values differ, their numbers differ (but for chance).

    Ranks compare the number and its negative as int64. 61 bits leave room for numbers that stand for nothing.
    ``hash()`` does not work: Python seeds the hash of a string differently in each process.

    Args:
        value: Bytes, or anything whose ``repr`` contains all that is compared.
    """
    content = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 3
