"""Logging: one readable line an event, on standard error or in a file that is kept small."""

import logging
import logging.handlers
import os

from services.common.errors import invalid_field

# Set by service managers that keep no journal (see deploy/launchd).
LOG_FILE = "SHARDRING_LOG_FILE"
FILE_BYTES, OLD_FILES = 10_000_000, 5


def start_logging(level: str) -> None:
    """Send log records of `level` ("debug" to "error") and above to standard error.

    Or to the file that SHARDRING_LOG_FILE names: at 10 MB it becomes FILE.1, and so on to FILE.5.
    Raises INVALID_FIELD when it cannot be written.
    """
    # Of this process alone: what its children say, they say to it.
    path = os.environ.pop(LOG_FILE, "")
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S" if path else "%H:%M:%S",
        handlers=[_file(path)] if path else None,
    )
    for noisy in (
        "httpx",
        "httpx2",
        "httpcore",
        "urllib3",
        "filelock",
        "huggingface_hub",
        "asyncio",
    ):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _file(path: str) -> logging.Handler:
    try:
        return logging.handlers.RotatingFileHandler(
            path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8"
        )
    except OSError as error:
        raise invalid_field(LOG_FILE, path, f"a file to write to ({error.strerror})") from error
