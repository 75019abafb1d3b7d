"""What every client command has: the cluster, --json, two consoles, and a quiet end."""

import asyncio
import dataclasses
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry import trace
from rich.console import Console

from services.cli.client import ClientOptions, Cluster, located
from services.cli.follow import follow_instance
from services.cli.instances import Follow
from services.common.options import with_options
from services.common.security import use_security
from services.common.telemetry import start_telemetry
from shardring.runner.v1 import instance_service_pb2, runner_pb2

TERMINATED = 128 + signal.SIGTERM
# Ranges are those of the messages' fields; what makes sense is for the service to say.
INT32 = click.IntRange(-(2**31), 2**31 - 1)
INT64 = click.IntRange(-(2**63), 2**63 - 1)
# Wide enough that nothing is cut or folded where no terminal sets a width.
_PLAIN_WIDTH = 10_000


@dataclass(frozen=True)
class Shell:
    """What a command works with. Results go to `out`, progress and remarks to `err`."""

    cluster: Cluster
    out: Console
    err: Console
    json: bool

    def print_document(self, document: Message | dict[str, Any]) -> None:
        """Print the one JSON document of a command."""
        print(json.dumps(as_dict(document), indent=2), flush=True)

    def print_line(self, message: Message) -> None:
        """Print one JSON object of a command that streams."""
        print(json.dumps(as_dict(message)), flush=True)

    def remark(self, text: str) -> None:
        """Tell people something beside the result."""
        self.err.print(text, style="yellow", markup=False)


def as_dict(document: Message | dict[str, Any]) -> dict[str, Any]:
    """Return a message as JSON with the proto's field names, fields of value zero included."""
    if isinstance(document, dict):
        return document
    return MessageToDict(
        document, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def make_console(file: TextIO) -> Console:
    """Return a console that shows text as it is; plain and of any width off a terminal."""
    console = Console(file=file, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def follower(shell: Shell) -> Follow:
    """Return what shows an instance's way to READY: to people, or as JSON."""

    async def show(changes: AsyncIterator[runner_pb2.Instance]) -> runner_pb2.Instance:
        if not shell.json:
            return await follow_instance(changes, shell.err)

        async def printed() -> AsyncIterator[runner_pb2.Instance]:
            async for instance in changes:
                shell.print_line(instance_service_pb2.WatchInstanceResponse(instance=instance))
                yield instance

        return await follow_instance(printed(), Console(quiet=True))

    return show


def client_command(work: Callable[..., Awaitable[None]]) -> click.Command:
    """Make a click command of a coroutine function that takes a Shell and its own parameters.

    Gives it --json and the ClientOptions.
    """

    def command(options: ClientOptions, as_json: bool, **values: Any) -> None:
        check_text({**dataclasses.asdict(options), **values})
        _run(work, options, as_json, values)

    command.__name__, command.__doc__ = work.__name__, work.__doc__
    shared: Any = with_options(ClientOptions)(_json_flag(command))
    # Click lists the last ones first: the command's own parameters before the shared ones.
    shared.__click_params__ += getattr(work, "__click_params__", [])
    made: click.Command = click.command(shared)
    return made


def check_text(values: Mapping[str, object]) -> None:
    """Refuse bytes that are no UTF-8, which Python hands on as lone surrogates: no message can
    hold them. Raises click.UsageError naming the parameter."""
    for name, value in values.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise click.UsageError(f"{name} is not UTF-8 text: {text!a}.") from error


def _note_json(ctx: click.Context, _: click.Parameter, as_json: bool) -> bool:
    # `services.cli.main` prints an error as JSON too. Other callers may bring no object.
    if ctx.obj is not None:
        ctx.obj.json = as_json
    return as_json


_json_flag = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    callback=_note_json,
    help="Print JSON with the protos' field names.",
)


def _run(
    work: Callable[..., Awaitable[None]],
    options: ClientOptions,
    as_json: bool,
    values: dict[str, Any],
) -> None:
    provider = start_telemetry("shardring-cli")
    tracer = trace.get_tracer(__name__)

    async def guarded() -> None:
        task = asyncio.current_task()
        assert task is not None
        # As Ctrl-C does: what the command started is stopped on the way out.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        use_security(options)
        async with Cluster(await located(options)) as cluster:
            shell = Shell(cluster, make_console(sys.stdout), make_console(sys.stderr), as_json)
            with tracer.start_as_current_span(f"shardring {work.__name__}"):
                await work(shell, **values)

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        sys.exit(TERMINATED)
    finally:
        provider.shutdown()
