"""Measure, and fail when a bar is missed: `python -m tests.benchmarks [NAME ...]`."""

import asyncio
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from tests.benchmarks import (
    batch,
    downloads,
    downloads_fleet,
    idle,
    loading,
    placement,
    predicted,
    prefill,
    ring,
    serving_path,
    single,
    topology,
)
from tests.benchmarks.report import Figure, Report

_BENCHMARKS: dict[str, Callable[[Path, Path], Awaitable[Report]]] = {
    "single": single.measure,
    "batch": batch.measure_batch,
    "lanes": batch.measure_lanes,
    "ring": ring.measure,
    "prefill": prefill.measure,
    "loading": loading.measure,
    "serving": serving_path.measure,
    "idle": idle.measure,
    "topology": topology.measure,
    "placement": placement.measure,
    "predicted": predicted.measure,
    "downloads": downloads.measure,
    "downloads-fleet": downloads_fleet.measure,
}
_PACKAGES = ("mlx", "mlx-lm", "grpcio", "protobuf")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(_BENCHMARKS)), metavar="[NAME]...")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write figures here.")
def main(names: tuple[str, ...], json_file: Path | None) -> None:
    """Run the benchmarks NAME (all of them without one) and show what they found."""
    machine = _machine()
    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    figures = asyncio.run(_run(names or tuple(_BENCHMARKS), console))
    if json_file is not None:
        found = [asdict(figure) | {"missed": figure.missed} for figure in figures]
        json_file.write_text(json.dumps({"machine": machine, "figures": found}, indent=2) + "\n")
    sys.exit(any(figure.missed for figure in figures))


async def _run(names: tuple[str, ...], console: Console) -> list[Figure]:
    figures: list[Figure] = []
    # mlx-lm's tokenizers warn of an end token that is none.
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    with tempfile.TemporaryDirectory() as folder:
        hub = Path(folder) / "hub"
        await _write_models(hub)
        for name in names:
            console.print(f"{name}: load {os.getloadavg()[0]:.1f} before")
            report = await _BENCHMARKS[name](Path(folder) / name, hub)
            for shown in report.tables:
                console.print(shown)
            for figure in report.figures:
                click.echo(figure)
            figures += report.figures
    return figures


async def _write_models(hub: Path) -> None:
    command = (sys.executable, "-m", "tests.benchmarks.models", str(hub))
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait():
        raise click.ClickException("The models could not be made; see above.")


def _machine() -> dict[str, str]:
    facts = {"system": f"{platform.system()} {platform.machine()}", "cores": str(os.cpu_count())}
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return facts | {"python": platform.python_version()} | versions


if __name__ == "__main__":
    main()
