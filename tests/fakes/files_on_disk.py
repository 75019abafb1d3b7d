"""Stands in for the downloads service towards a runner: the files are there already."""

from collections.abc import Callable
from pathlib import Path

MODEL = Path(__file__).parents[2] / "models" / "shardring" / "tiny-facts"


class FilesOnDisk:
    """Every model's files are in one folder."""

    def __init__(self, folder: Path = MODEL) -> None:
        self._folder = folder

    async def fetch(
        self,
        instance_id: str,
        model_id: str,
        commit: str,
        layers: tuple[int, int],
        on_progress: Callable[..., None],
    ) -> Path:
        """Return the folder."""
        return self._folder

    async def close(self) -> None:
        """Do nothing."""
