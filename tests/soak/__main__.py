"""`python -m tests.soak rounds|cancels [--count N]`: exit status 1 when something stayed behind."""

import asyncio
import sys

import click

from tests.soak.cancels import cancels
from tests.soak.rounds import rounds


@click.command()
@click.argument("what", type=click.Choice(["rounds", "cancels"]))
@click.option("--count", type=click.IntRange(min=10), help="How many; 200 rounds, 10,000 cancels.")
def main(what: str, count: int | None) -> None:
    """Run a soak."""
    work = rounds(count or 200) if what == "rounds" else cancels(count or 10_000)
    sound = asyncio.run(work)
    click.echo("nothing stayed behind" if sound else "SOMETHING STAYED BEHIND")
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
