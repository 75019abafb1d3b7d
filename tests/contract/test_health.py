"""`shardring health`, which container engines ask, against real servers."""

import asyncio
import http.server
import socket
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from services.cli.commands.health import health
from services.common.addresses import HostPort
from services.common.server import start_server


def ask(address: str) -> Result:
    return CliRunner().invoke(health, [address, "--seconds", "20"])


async def test_a_grpc_server_is_healthy_while_it_serves() -> None:
    server = await start_server(HostPort("127.0.0.1", 0), [])
    address = f"127.0.0.1:{server.port}"
    try:
        refused = await asyncio.to_thread(ask, address)
        assert (refused.exit_code, "NOT_SERVING" in refused.output) == (1, True)
        await server.set_serving(True)
        assert (await asyncio.to_thread(ask, address)).output == f"{address} serves\n"
    finally:
        await server.stop()


def test_nobody_is_not_healthy() -> None:
    with socket.socket() as taken:
        # Bound, and nobody listens.
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        for address in (place, f"http://{place}/"):
            result = ask(address)
            assert result.exit_code == 1
            assert "does not serve" in result.output
            assert "refused" in result.output


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(int(self.path.strip("/")))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "exit_code"), [(404, 0), (500, 1), (503, 1)])
def test_a_web_server_is_healthy_unless_it_says_otherwise(
    web: str, status: int, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy is no way to one's own health.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert ask(f"{web}/{status}").exit_code == exit_code


def test_nonsense_is_refused() -> None:
    assert CliRunner().invoke(health, ["nowhere"]).exit_code == 1
