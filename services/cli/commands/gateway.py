"""`shardring gateway`."""

import asyncio
import json
from typing import Any

import click

from services.cli.gateway.following import Follower
from services.cli.gateway.smg import Smg, SmgOptions, check_installed, has_tls
from services.cli.gateway.workers import Worker
from services.cli.shell import Shell, client_command
from services.cli.text import without_controls
from services.common.addresses import HostPort
from services.common.security import is_loopback
from services.common.server import announce

_PORT = click.IntRange(0, 65535)
_LOOPBACK = ("localhost", "127.", "::1")


@client_command
@click.argument("smg_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve on; 0.0.0.0 for all of this machine's.",
)
@click.option(
    "--port",
    type=_PORT,
    default=52470,
    show_default=True,
    help="Port to serve on; 0 takes any free one.",
)
@click.option(
    "--metrics-port",
    type=_PORT,
    default=0,
    help="Port of smg's Prometheus metrics, on 127.0.0.1; 0 takes any free one.",
)
@click.option(
    "--insecure",
    is_flag=True,
    envvar="SHARDRING_INSECURE",
    show_envvar=True,
    help="Listen on other than loopback in the clear. Else give smg a certificate: "
    "-- --tls-cert-path FILE --tls-key-path FILE",
)
@click.option(
    "--model", "models", multiple=True, help='Serve this model ("organisation/name") only.'
)
async def gateway(
    shell: Shell,
    smg_options: tuple[str, ...],
    host: str,
    port: int,
    metrics_port: int,
    insecure: bool,
    models: tuple[str, ...],
) -> None:
    """Serve the OpenAI and Anthropic APIs in front of the cluster's READY instances.

    Runs smg, and keeps its workers those of the cluster: instances that become READY are added,
    ended ones removed. Clients name a model as `shardring up` does. SMG_OPTIONS, after "--", are
    handed to smg: `shardring gateway -- --api-key KEY --tool-call-parser qwen`.
    """
    check_installed()
    if not insecure and not is_loopback(host) and not has_tls(smg_options):
        raise click.UsageError(
            f"Without TLS, what clients and {host} say can be read by others. Give smg a "
            "certificate (-- --tls-cert-path FILE --tls-key-path FILE), listen on 127.0.0.1, or on "
            "a network that you trust say --insecure (SHARDRING_INSECURE=1)."
        )
    talk = _Talk(shell)
    async with Smg(SmgOptions(host, port, metrics_port, smg_options), talk.log) as smg:
        talk.listening(smg.address)
        following = asyncio.create_task(
            Follower(shell.cluster, smg, models, talk).run(), name="following the cluster"
        )
        ended = asyncio.create_task(smg.ended(), name="smg ended")
        try:
            await asyncio.wait([following, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ended.result()
            following.result()
        finally:
            for task in (following, ended):
                task.cancel()
            await asyncio.gather(following, ended, return_exceptions=True)


class _Talk:
    """Says what happens: to people in lines, or as one JSON object a line."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def log(self, line: str) -> None:
        """Pass on what smg says."""
        self._shell.err.print(f"smg: {without_controls(line)}", style="dim")

    def listening(self, address: HostPort) -> None:
        if self._shell.json:
            self._event("listening", host=address.host, port=address.port)
        else:
            announce("gateway", address)
        if not address.host.startswith(_LOOPBACK):
            self._shell.remark(
                f"Whoever reaches {address} can use it, unless smg is given a key: "
                "shardring gateway -- --api-key KEY"
            )

    def waiting(self) -> None:
        self._say("No instance is READY; waiting for one.", "waiting")

    def cluster_lost(self, why: str) -> None:
        self._shell.remark(f"{why} Going on with the instances known so far.")

    def added(self, worker: Worker, address: HostPort) -> None:
        self._say(
            f"{worker.instance_id} answers for {worker.model_id}, at {address}",
            "added",
            **self._named(worker),
            address=str(address),
        )

    def removed(self, worker: Worker) -> None:
        self._say(
            f"{worker.instance_id} answers no more for {worker.model_id}",
            "removed",
            **self._named(worker),
        )

    def late(self, worker: Worker, why: str) -> None:
        self._shell.remark(f"{worker.instance_id} is READY, but {why}.")

    @staticmethod
    def _named(worker: Worker) -> dict[str, Any]:
        return {"instance_id": worker.instance_id, "model_id": worker.model_id}

    def _say(self, line: str, event: str, **fields: Any) -> None:
        if self._shell.json:
            self._event(event, **fields)
        else:
            self._shell.out.print(line)

    def _event(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), flush=True)
