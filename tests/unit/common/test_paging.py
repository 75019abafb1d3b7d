"""Pages of a list that changes while it is read."""

import base64

import pytest

from services.common.errors import Reason, ShardringError
from services.common.paging import newest_first, page


def test_pages_cover_everything_once_in_order() -> None:
    items = [f"{i:03}" for i in range(250)]
    seen: list[str] = []
    token, pages = "", 0
    while pages == 0 or token:
        given, token = page(reversed(items), 0, token, key=str)
        seen += given
        pages += 1
    assert (seen, pages) == (items, 3)
    assert page(items, 250, "", key=str) == (items, "")
    assert page([], 1, "", key=str) == ([], "")


def test_items_that_come_and_go_shift_nothing() -> None:
    first, token = page("acegik", 2, "", key=str)
    assert first == ["a", "c"]
    # "a" and "c" went, "b" and "d" came: only what stands behind "c" is left to give.
    assert page("bdegik", 9, token, key=str) == (list("degik"), "")


def test_newest_first() -> None:
    made = [(5.0, "b"), (7.5, "a"), (5.0, "a"), (0.0, "z"), (2e9, "é")]
    ordered = sorted(made, key=lambda entry: newest_first(*entry))
    assert ordered == [(2e9, "é"), (7.5, "a"), (5.0, "a"), (5.0, "b"), (0.0, "z")]


@pytest.mark.parametrize(
    ("size", "token", "field"),
    [
        (-1, "", "page_size"),
        (1001, "", "page_size"),
        (1, "nonsense", "page_token"),
        (1, "é", "page_token"),
        (1, base64.urlsafe_b64encode(b"at:3").decode(), "page_token"),
        (1, base64.urlsafe_b64encode(b"after:\xff").decode(), "page_token"),
    ],
)
def test_what_no_page_gave_is_refused(size: int, token: str, field: str) -> None:
    with pytest.raises(ShardringError) as refusal:
        page("abc", size, token, key=str)
    assert refusal.value.reason is Reason.INVALID_FIELD
    assert refusal.value.metadata["field"] == field
