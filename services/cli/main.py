"""The `shardring` command: its table of commands, and how each of them may end."""

import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import click

from services.cli.lazy import Lazy, LazyGroup
from services.cli.text import error_details
from services.common.errors import ShardringError

INTERRUPTED = 130
# What writing to a full or broken disk says, as opposed to faults of our own.
_OUTPUT_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_IN = "services.cli.commands"
COMMANDS = {
    "serve": Lazy(
        None,
        "Run one of the cluster's services.",
        "shardring serve topology --listen 0.0.0.0:52410 --insecure",
        {
            "topology": Lazy(
                "services.topology.__main__:main",
                "Track which nodes are alive and which links join them.",
                "shardring serve topology --listen 0.0.0.0:52410 --insecure",
            ),
            "placement": Lazy(
                "services.placement.__main__:main",
                "Pick the ring of nodes that runs a model.",
                "shardring serve placement --topology 127.0.0.1:52410",
            ),
            "downloads": Lazy(
                "services.downloads.__main__:main",
                "Know what is on which node's disk, and have nodes fetch.",
                "shardring serve downloads --listen 0.0.0.0:52412 --insecure",
            ),
            "hub": Lazy(
                f"{_IN}.hub:hub",
                "Serve a folder of models to nodes without internet.",
                "shardring serve hub models --listen 0.0.0.0:52490 --insecure",
            ),
        },
    ),
    "pki": Lazy(
        None,
        "Make the certificates with which a cluster's processes know each other.",
        "shardring pki init",
        {
            "init": Lazy(
                f"{_IN}.pki:init", "Make a cluster's certificate authority.", "shardring pki init"
            ),
            "issue": Lazy(
                f"{_IN}.pki:issue",
                "Make a certificate of the cluster's authority.",
                "shardring pki issue studio-1 --host 10.0.0.5",
            ),
            "node-id": Lazy(
                f"{_IN}.pki:node_id",
                "Say which id this machine's node has; make it where there is none.",
                "shardring pki node-id",
            ),
        },
    ),
    "node": Lazy(
        f"{_IN}.node:node",
        "Run this machine's node.",
        "shardring node --join studio-1 --listen 0.0.0.0:52420 --insecure",
    ),
    "nodes": Lazy(f"{_IN}.nodes:nodes", "Show the machines of the cluster.", "shardring nodes"),
    "links": Lazy(
        f"{_IN}.links:links", "Show the verified links between nodes.", "shardring links"
    ),
    "doctor": Lazy(
        f"{_IN}.doctor:doctor",
        "Say what is wrong with the cluster's network.",
        "shardring doctor",
    ),
    "health": Lazy(
        f"{_IN}.health:health",
        "Say whether a service, node or gateway serves.",
        "shardring health 127.0.0.1:52420",
    ),
    "models": Lazy(
        f"{_IN}.models:models",
        "Show which models are on which nodes, and verify them.",
        "shardring models --verify mlx-community/Qwen3-0.6B-4bit",
    ),
    "download": Lazy(
        f"{_IN}.download:download",
        "Fetch a model to nodes' disks.",
        "shardring download mlx-community/Qwen3-0.6B-4bit --node studio-1",
    ),
    "rm": Lazy(
        f"{_IN}.rm:rm",
        "Remove a model from nodes' disks.",
        "shardring rm mlx-community/Qwen3-0.6B-4bit --node studio-1",
    ),
    "preview": Lazy(
        f"{_IN}.preview:preview",
        "Show how a model could be placed, by ring size.",
        "shardring preview mlx-community/Qwen3-0.6B-4bit --exclude studio-2",
    ),
    "up": Lazy(
        f"{_IN}.up:up",
        "Place and start a model.",
        "shardring up mlx-community/Qwen3-0.6B-4bit --min-nodes 2 --name chat",
    ),
    "run": Lazy(
        f"{_IN}.run:run",
        "Answer a prompt, starting the model when needed.",
        'shardring run mlx-community/Qwen3-0.6B-4bit "Why is the sky blue?" --keep',
    ),
    "ps": Lazy(f"{_IN}.ps:ps", "Show instances, ended ones too.", "shardring ps"),
    "top": Lazy(
        f"{_IN}.top:top",
        "Watch what instances do and what their ranks spend.",
        "shardring top chat",
    ),
    "logs": Lazy(
        f"{_IN}.logs:logs",
        "Show the last log lines of an instance's ranks.",
        "shardring logs chat --rank 1",
    ),
    "generate": Lazy(
        f"{_IN}.generate:generate",
        "Answer a prompt on an instance.",
        'shardring generate chat "Why is the sky blue?" --temperature 0.7',
    ),
    "down": Lazy(f"{_IN}.down:down", "Stop instances.", "shardring down chat"),
    "gateway": Lazy(
        f"{_IN}.gateway:gateway",
        "Serve the OpenAI and Anthropic APIs in front of all instances.",
        "shardring gateway --port 52470",
    ),
    "install": Lazy(
        f"{_IN}.install:install",
        "Have systemd or launchd run this machine's node, or the services.",
        "sudo shardring install node --join studio-1 --host 0.0.0.0 --insecure",
    ),
    "uninstall": Lazy(
        f"{_IN}.install:uninstall",
        "Take that away again, without a trace.",
        "sudo shardring uninstall",
    ),
}


@dataclass
class Asked:
    """What the command line asked for that matters to its end. Set while it is read."""

    json: bool = False


@click.group(cls=LazyGroup, lazy=COMMANDS, epilog="Each command shows an example with --help.")
@click.version_option(package_name="shardring", message="shardring %(version)s")
def cli() -> None:
    """Run one language model across several machines joined in a ring."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 refused or failed, 2 misused, 130 interrupted."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as we live
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode still gets tables
    asked = Asked()
    try:
        code = cli.main(args, prog_name="shardring", standalone_mode=False, obj=asked)
        sys.stdout.flush()
    except ShardringError as error:
        _print_error(error, asked.json)
        code = 1
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # whoever read it has gone
        code = 1
    except OSError as error:
        if error.errno not in _OUTPUT_FAULTS:
            raise
        _drop_output()
        click.echo(f"Cannot write the output: {error.strerror}.", err=True)
        code = 1
    sys.exit(code)


def _drop_output() -> None:
    """Let the interpreter's last flush of standard output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(error: ShardringError, as_json: bool) -> None:
    if as_json:
        details = {
            "reason": str(error.reason),
            "message": error.message,
            "metadata": error.metadata,
        }
        click.echo(json.dumps({"error": details}), err=True)
        return
    colour = False if os.environ.get("NO_COLOR") else None
    click.echo(error.message, err=True, color=colour)
    click.echo(click.style(error_details(error), dim=True), err=True, color=colour)
