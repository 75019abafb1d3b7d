"""A bound on the bytes that several threads receive in a second."""

import threading
import time

# So much of a second's bytes may come at once.
_BURST_SECONDS = 0.1
# A rate that changes is heeded within this time.
_LONGEST_WAIT_SECONDS = 0.5


class Budget:
    """Bytes per second for all threads of a process together; 0: without a bound."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate = 0.0
        self._free_at = 0.0

    def limit(self, bytes_per_second: float) -> None:
        """Change the bound. What was taken too much before is waited for at the new pace."""
        with self._lock:
            now = time.monotonic()
            owed = max(0.0, self._free_at - now) * self._rate
            self._rate = bytes_per_second
            self._free_at = now + (owed / bytes_per_second if bytes_per_second else 0.0)

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may be received."""
        with self._lock:
            if not self._rate:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_SECONDS) + count / self._rate
            mine, rate = self._free_at, self._rate
        while (wait := mine - time.monotonic()) > 0 and self._rate == rate:
            time.sleep(min(wait, _LONGEST_WAIT_SECONDS))
