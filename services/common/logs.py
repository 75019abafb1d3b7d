"""Logging: one readable line an event on standard error."""

import logging


def start_logging(level: str) -> None:
    """Send log records of `level` ("debug" to "error") and above to standard error."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
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
