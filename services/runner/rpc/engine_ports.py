"""A port for each READY instance that a node heads, where MlxEngine is that instance.

MlxEngine has no field for an instance, and a gateway can send nothing beside its messages; an
address is all that it is told.
"""

import logging
import socket
import zlib
from collections.abc import Iterator
from contextlib import aclosing

from services.common.addresses import HostPort
from services.common.server import ListenError, Server, start_server
from services.runner.app import Runner
from services.runner.domain.state import InstanceState
from services.runner.rpc.mlx_engine import mlx_engine_registration

logger = logging.getLogger(__name__)

# Above the ports that rings take.
FIRST_PORT, LAST_PORT = 65001, 65535
_START_ATTEMPTS = 10


class EnginePorts:
    """Serves instances of `runner` on `host`, each while it is READY."""

    def __init__(self, runner: Runner, host: str) -> None:
        self._runner = runner
        self._host = host

    async def serve(self, instance_id: str, run_id: str) -> None:
        """Serve one start of an instance whenever it is READY, until it has ended."""
        server: Server | None = None
        try:
            async with aclosing(self._runner.watch(instance_id, run_id)) as views:
                async for view in views:
                    is_ready = view.state is InstanceState.READY
                    if is_ready and server is None:
                        server = await self._start(instance_id)
                        self._runner.note_mlx_engine_port(instance_id, run_id, server.port)
                    elif server is not None and not is_ready:
                        self._runner.note_mlx_engine_port(instance_id, run_id, 0)
                        await server.stop()
                        server = None
        except ListenError as error:
            logger.error("Instance %s is not served to gateways: %s", instance_id, error)
        finally:
            if server is not None:
                self._runner.note_mlx_engine_port(instance_id, run_id, 0)
                await server.stop()

    async def _start(self, instance_id: str) -> Server:
        """Raises ListenError when no port is free, or all are taken away in the moment between."""
        registration = mlx_engine_registration(self._runner, instance_id)
        refused: ListenError | None = None
        for _, port in zip(range(_START_ATTEMPTS), self._free_ports(instance_id), strict=False):
            try:
                server = await start_server(HostPort(self._host, port), [registration])
            except ListenError as error:
                refused = error
                continue
            await server.set_serving(True)
            return server
        raise refused or ListenError(f"None of the ports {FIRST_PORT} to {LAST_PORT} is free.")

    def _free_ports(self, instance_id: str) -> Iterator[int]:
        """Yield ports that nobody has, an instance's usual one first: the one it has each time
        it is started, so that a gateway elsewhere may be told of it once."""
        count = LAST_PORT - FIRST_PORT + 1
        start = zlib.crc32(instance_id.encode()) % count
        for step in range(count):
            port = FIRST_PORT + (start + step) % count
            if _is_free(self._host, port):
                yield port


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
