"""Numbers with their nouns, for messages."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 step` or `1,000 steps`; `plural` of nouns that take another ending than s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
