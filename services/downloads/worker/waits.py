"""How long a hub's answer says to wait before it is asked again."""

import email.utils
import re
from collections.abc import Mapping

# The draft that hubs follow: "api";r=0;t=55 says that nothing remains for 55 seconds.
_RATE_LIMIT = re.compile(r"(?:^|;)\s*(?P<key>[rt])\s*=\s*(?P<value>\d+)")


def told_wait(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds to wait, None when the answer does not say.

    `headers` by lower-case name; `now` in seconds since 1970. Read are `RateLimit`, which is exact
    (https://www.ietf.org/archive/id/draft-ietf-httpapi-ratelimit-headers-09.html), when it says
    that nothing remains, else `Retry-After` with seconds or a date.
    """
    limits = {
        match["key"]: int(match["value"])
        for match in _RATE_LIMIT.finditer(headers.get("ratelimit", ""))
    }
    if limits.get("r") == 0 and "t" in limits:
        return float(limits["t"])
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return None
