"""How often workers are to report."""

import pytest

from services.downloads.domain.pace import (
    MAX_REPORT_SECONDS,
    MIN_REPORT_SECONDS,
    REPORTS_PER_SECOND,
    report_seconds,
)


@pytest.mark.parametrize("live", [0, 1, 64, 100, 101, 256, 500, 1000])
@pytest.mark.parametrize("before", [0.5, 1.0, 2.0, 5.0])
def test_all_reports_together_stay_within_the_budget(live: int, before: float) -> None:
    seconds = report_seconds(live, before)
    assert live / seconds <= REPORTS_PER_SECOND
    assert MIN_REPORT_SECONDS <= seconds <= MAX_REPORT_SECONDS


def test_a_few_are_told_twice_a_second_and_the_most_every_few_seconds() -> None:
    assert report_seconds(10, 0.5) == MIN_REPORT_SECONDS
    assert report_seconds(100_000, 0.5) == MAX_REPORT_SECONDS
    assert report_seconds(10, 5.0) == MIN_REPORT_SECONDS


def test_a_little_less_to_report_is_not_told_to_everybody() -> None:
    told, now = 0, 0.5
    for live in [*range(190, 210)] * 10:
        before, now = now, report_seconds(live, now)
        told += now != before
    assert (told, now) == (2, 1.5)  # up, and up once more
