"""Asking before something cannot be undone."""

import asyncio
import sys

import click

from services.cli.shell import Shell


def check_confirmable(shell: Shell, yes: bool) -> None:
    """Raise click.UsageError when there is neither --yes nor a terminal to ask on."""
    if not yes and (shell.json or not (sys.stdin.isatty() and shell.err.is_terminal)):
        raise click.UsageError("Nobody can be asked here whether to go on: say --yes.")


async def confirm(shell: Shell, question: str) -> bool:
    """Ask on the terminal; anything but yes is no. A Ctrl-C ends the command as always."""
    shell.err.print(f"{question} [y/N] ", end="", soft_wrap=True)
    # Not input(), which would keep signals from being heard.
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sys.stdin)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
