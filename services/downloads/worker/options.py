"""Where a worker keeps models and which hub it reads."""

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants

# What the service assigns at a time, and what a child may well have threads for.
MAX_PARALLEL_FILES = 64


@dataclass(frozen=True)
class CacheOptions:
    """The defaults are huggingface_hub's own, so HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and
    HF_HUB_OFFLINE mean what they mean everywhere. It reads them when first imported."""

    # The cache folder, shared with every other tool that uses huggingface_hub.
    cache_dir: Path = field(default_factory=lambda: Path(constants.HF_HUB_CACHE))
    # The hub's address.
    endpoint: str = field(default_factory=lambda: str(constants.ENDPOINT))
    # Access token. None: HF_TOKEN, else the one that `hf auth login` stored.
    token: str | None = field(default=None, repr=False)
    # True: never ask the hub.
    offline: bool = field(default_factory=constants.is_offline_mode)
    # Files fetched at a time, by all downloads together.
    parallel_files: int = 4
    # Bytes received per second by all downloads together. 0: as many as come.
    bytes_per_second: float = 0.0
    # How long a download goes on without a byte gained, beside what the hub asks to wait.
    patience_seconds: float = 300.0
    # How often the cache folder is looked through for what other programs changed.
    rescan_seconds: float = 30.0
