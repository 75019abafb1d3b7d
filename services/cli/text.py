"""Figures and foreign text in words that fit a line."""

import json
import re
from collections.abc import Sequence

from services.common.errors import ShardringError

# Everything a terminal could take for a command, but not line ends and tabs.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(byte_count: float) -> str:
    """Return bytes with a decimal unit and two or three digits: "512 B", "7.1 MB", "380 GB"."""
    value, unit = float(byte_count), 0
    # Rounding must not give "1000 kB".
    while abs(value) >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def speed(bytes_per_second: float) -> str:
    """Return a throughput in bits: "9.4 Gbit/s", "94 Mbit/s", "0.3 Mbit/s"."""
    megabits = bytes_per_second * 8 / 1e6
    if megabits >= 999.5:
        return f"{megabits / 1000:.{0 if megabits >= 99_950 else 1}f} Gbit/s"
    return f"{megabits:.{0 if megabits >= 9.95 else 1}f} Mbit/s"


def listed(words: Sequence[str], most: int = 6) -> str:
    """Return "a", "a and b", "a, b and c", "a, b and 7 more"."""
    shown = list(words)
    if len(shown) > most:
        shown[most - 1 :] = [f"{len(words) - most + 1} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units: "0.42 ms", "3.1 s", "2 min 5 s", "4 d 1 h"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.2f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return whole_duration(seconds)


def whole_duration(seconds: float) -> str:
    """Return a time span in whole seconds or its two largest units: "0 s", "2 min 5 s"."""
    whole = round(seconds)
    for unit, small, unit_seconds, small_seconds in (
        ("d", "h", 86_400, 3_600),
        ("h", "min", 3_600, 60),
        ("min", "s", 60, 1),
    ):
        if whole >= unit_seconds:
            rest = whole % unit_seconds // small_seconds
            return f"{whole // unit_seconds} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def age(seconds: float) -> str:
    """Return a time span in its largest unit, rounded down: "12 s", "3 min", "2 h", "5 d"."""
    whole = max(0, int(seconds))
    for unit, unit_seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if whole >= unit_seconds:
            return f"{whole // unit_seconds} {unit}"
    return f"{whole} s"


def percent(fraction: float) -> str:
    """Return a fraction as whole per cent; never 100 % of what isn't whole, nor 0 % of some."""
    whole = round(fraction * 100)
    if fraction < 1:
        whole = min(whole, 99)
    if fraction > 0:
        whole = max(whole, 1)
    return f"{whole} %"


def rate(per_second: float) -> str:
    """Return how many come in a second: "0", "0.4", "52.3", "1240"."""
    if per_second <= 0:
        return "0"
    return f"{per_second:.1f}" if per_second < 99.95 else f"{per_second:.0f}"


def count(number: int, noun: str) -> str:
    """Return "1 node", "3 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def stage(start: int, end: int) -> str:
    """Return layers [start, end)."""
    return f"[{start},{end})"


def without_controls(text: str) -> str:
    """Return text that may be written to a terminal: what a model says must not steer it."""
    return _CONTROLS.sub("", text)


def quoted(text: str) -> str:
    """Return text in quotes, on one line, with spaces and line ends that can be seen."""
    return without_controls(json.dumps(text, ensure_ascii=False))


def error_details(error: ShardringError) -> str:
    """Return an error's reason, and those of its figures that its message doesn't tell already."""
    parts = [str(error.reason)]
    for key, value in sorted(error.metadata.items()):
        # A digit or two may stand in the message for something else.
        if not value or (len(value) > 2 and value in error.message):
            continue
        if key.endswith("_bytes") and value.isdecimal():
            key, value = key.removesuffix("_bytes"), size(int(value))
        parts.append(f"{key}: {value}")
    return " · ".join(parts)
