"""Pages of lists: a size, and a token that says where the next page begins."""

import base64
from collections.abc import Sequence
from typing import TypeVar

from services.common.errors import invalid_field

Item = TypeVar("Item")

DEFAULT_SIZE = 100
MAX_SIZE = 1000


def page(items: Sequence[Item], size: int, token: str) -> tuple[Sequence[Item], str]:
    """Return one page and the next page's token, empty on the last.

    `size` 0 means 100. Raises ShardringError(INVALID_FIELD) for another size than 0 to 1000, and
    for a token that no page gave.
    """
    if not 0 <= size <= MAX_SIZE:
        raise invalid_field("page_size", size, f"0 to {MAX_SIZE}")
    start = _read_token(token)
    end = start + (size or DEFAULT_SIZE)
    return items[start:end], _write_token(end) if end < len(items) else ""


def _write_token(start: int) -> str:
    return base64.urlsafe_b64encode(b"at:%d" % start).decode()


def _read_token(token: str) -> int:
    if not token:
        return 0
    try:
        prefix, _, start = base64.urlsafe_b64decode(token).partition(b":")
        if prefix == b"at":
            return max(0, int(start))
    except ValueError:
        pass
    raise invalid_field("page_token", token, "a next_page_token, or nothing")
