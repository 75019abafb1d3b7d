"""Pages of lists: a size, and a token that says where the next page begins.

A token names the last item that was given, so that items which come or go meanwhile shift nothing:
none that stays is given twice or left out.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from services.common.errors import invalid_field

Item = TypeVar("Item")

DEFAULT_SIZE = 100
MAX_SIZE = 1000
_PREFIX = b"after:"


def page(
    items: Iterable[Item], size: int, token: str, *, key: Callable[[Item], str]
) -> tuple[Sequence[Item], str]:
    """Return one page of items in the order of their keys, and the next page's token, empty on
    the last.

    No two items share a key. `size` 0 means 100. Raises ShardringError(INVALID_FIELD) for another
    size than 0 to 1000, and for a token that no page gave.
    """
    if not 0 <= size <= MAX_SIZE:
        raise invalid_field("page_size", size, f"0 to {MAX_SIZE}")
    after = _read_token(token)
    left = sorted((item for item in items if not token or key(item) > after), key=key)
    given = left[: size or DEFAULT_SIZE]
    return given, _write_token(key(given[-1])) if len(given) < len(left) else ""


def newest_first(create_time: float, name: str) -> str:
    """Return a key that orders by falling time, in seconds since 1970, then by name."""
    return f"{10**20 - 1 - round(create_time * 1e9):020d}~{name}"


def _write_token(key: str) -> str:
    return base64.urlsafe_b64encode(_PREFIX + key.encode()).decode()


def _read_token(token: str) -> str:
    if not token:
        return ""
    try:
        text = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        if text.startswith(_PREFIX):
            return text.removeprefix(_PREFIX).decode()
    except ValueError:
        pass
    raise invalid_field("page_token", token, "a next_page_token, or nothing")
