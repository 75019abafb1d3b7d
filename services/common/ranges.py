"""Whole numbers as people write them."""

from collections.abc import Iterable


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in ascending order as text, such as "1-7, 9"; empty for none."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)
