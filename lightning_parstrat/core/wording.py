"""Numbers in messages."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, such as ``1 rank`` and ``2 ranks``.

    Args:
        number: How many there are.
        noun: The singular.
        plural: By default the singular and an s.
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
