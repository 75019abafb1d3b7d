"""A node that consists of nothing but identity and agent, on all addresses of its host."""

import asyncio
from pathlib import Path

import click

from services.common.addresses import HostPort, parse_host_port
from services.common.logs import start_logging
from services.common.security import Security
from services.common.server import announce, run, start_server, until_stopped
from services.topology.agent.agent import AgentOptions, TopologyAgent
from services.topology.agent.bursts import BurstGate
from services.topology.agent.identity import held_identity
from services.topology.agent.report import MemoryRules
from services.topology.agent.rpc import identity_registration


@click.command()
@click.option("--topology", required=True)
@click.option("--data-dir", required=True, type=click.Path(path_type=Path))
@click.option("--name", required=True)
@click.option("--port", required=True, type=int)
def main(topology: str, data_dir: Path, name: str, port: int) -> None:
    """Run the node until it is asked to stop, put together as the composition root does it."""

    async def serve() -> None:
        start_logging("warning")
        with held_identity(data_dir) as identity:
            gate = BurstGate(identity.node_id)
            listen = HostPort("0.0.0.0", port)
            server = await start_server(
                listen,
                [identity_registration(identity.node_id, gate)],
                security=Security(insecure=True),
            )
            agent = TopologyAgent(
                AgentOptions(
                    topology=parse_host_port(topology),
                    identity=identity,
                    listen=listen,
                    name=name,
                    memory=MemoryRules(memory_bytes=2**30),
                    gate=gate,
                )
            )
            running = asyncio.create_task(agent.run())
            announce("node", listen)
            await until_stopped()
            running.cancel()
            await asyncio.wait([running])
            await server.stop()

    run(serve)


if __name__ == "__main__":
    main()
