"""How often workers report, so that all of them together stay within what the service can take."""

MIN_REPORT_SECONDS = 0.5
MAX_REPORT_SECONDS = 5.0
# Reports about live downloads, from all nodes together.
REPORTS_PER_SECOND = 200.0
# A shorter pause is worth telling everybody when less than this part of the one before is needed.
_WORTH_TELLING = 0.6
_STEPS = (MIN_REPORT_SECONDS, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, MAX_REPORT_SECONDS)


def report_seconds(live_count: int, before: float) -> float:
    """Return the least seconds between two reports about one of `live_count` live downloads.

    `before` is what workers were told last, and stays while it is good enough.
    """
    needed = live_count / REPORTS_PER_SECOND
    if before * _WORTH_TELLING < needed <= before:
        return before
    return next((step for step in _STEPS if step >= needed), MAX_REPORT_SECONDS)
