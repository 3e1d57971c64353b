"""What may be written after an option: argparse types that tell a user what was expected."""

import argparse

#: No model has more; a slip of the finger should not fill the memory.
_MOST_LAYERS = 9999


def numbers(text: str) -> tuple[int, ...]:
    """(0, 3, 7, 8, 9) of "0,3,7-9"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            ends = int(first), int(last if dash else first)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected numbers such as 0,3,7-9, found {text!r}"
            ) from None
        if ends[0] > ends[1]:
            raise argparse.ArgumentTypeError(f"{part.strip()} runs backwards")
        if ends[1] > _MOST_LAYERS:
            raise argparse.ArgumentTypeError(f"{ends[1]} is above {_MOST_LAYERS}")
        found += range(ends[0], ends[1] + 1)
    for number in found:
        if found.count(number) > 1:
            raise argparse.ArgumentTypeError(f"{number} is there twice")
    return tuple(found)


def seed(text: str) -> int:
    """A number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text!r}")
    return int(text)


def path(text: str) -> str:
    """A path that is not blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a path, found nothing")
    return text


def words(text: str) -> tuple[str, ...]:
    """("a", "b") of "a, b"."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def ratios(text: str) -> tuple[str, ...]:
    """Numbers, as they were written."""
    for part in words(text):
        try:
            float(part)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected numbers such as 0.3,0.5, found {text!r}"
            ) from None
    return words(text)


def layer_map(text: str) -> str | tuple[int, ...]:
    """A list of layers, or "published"."""
    return text if text == "published" else numbers(text)
