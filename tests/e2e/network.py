"""Hosts in network namespaces of this machine, and the cables between them.

A LAN joins all of them, faster cables join them in a ring, a slow tunnel joins two that are no
neighbours in it, every host has the same container bridge, and one may not call another.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HOSTS = ("ada", "bob", "cyd", "dan")
RING = (("ada", "bob"), ("bob", "cyd"), ("cyd", "dan"), ("dan", "ada"))
TUNNEL = ("bob", "dan")
# The first may not call the second over the LAN.
FORBIDDEN = ("cyd", "ada")
PORT = 52420
TOPOLOGY_PORT = 52410
BRIDGE_ADDRESS = "172.17.0.1"
LAN_MBIT = 100
TUNNEL_MBIT, TUNNEL_MS, SLOWED_TUNNEL_MS = 8, 10, 60


def missing() -> str:
    """Return what this machine lacks for such hosts, "" when it lacks nothing."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("iptables", "iptables")):
        if shutil.which(program) is None:
            return f"`{program}` is missing (Debian's package {package})"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing"
    trial = f"sr{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", trial], capture_output=True)
    return f"no network namespace can be made here: {made.stderr}" if made.returncode else ""


def lan_address(host: str) -> str:
    return f"10.66.0.{HOSTS.index(host) + 1}"


def ring_address(host: str, other: str) -> str:
    """The address of `host` on its ring cable to `other`."""
    pair = next(pair for pair in RING if host in pair and other in pair)
    return f"169.254.{RING.index(pair) + 10}.{pair.index(host) + 1}"


def tunnel_address(host: str) -> str:
    return f"10.77.0.{TUNNEL.index(host) + 1}"


class Network:
    """The hosts; make them with `build` and take them away with `remove`."""

    def __init__(self) -> None:
        self._prefix = f"sr{os.getpid()}"
        self._up = f"{self._prefix}up"
        self._subnet = f"198.18.{os.getpid() % 250}"
        self.service = f"{self._subnet}.2"  # where this test finds the topology service
        self.topology = f"10.66.0.254:{TOPOLOGY_PORT}"  # where the hosts do
        self._wire: asyncio.subprocess.Process | None = None

    def namespace(self, host: str) -> str:
        """Return the namespace of a host, or of the "switch"."""
        return f"{self._prefix}{host}"

    async def build(self) -> None:
        """Make everything. Raises CalledProcessError when the kernel refuses a part."""
        switch = self.namespace("switch")
        for name in ("switch", *HOSTS):
            run("ip", "netns", "add", self.namespace(name))
            self.ip(name, "link set lo up")
        self.ip("switch", "link add lan type bridge")
        self.ip("switch", "link set lan up")
        self.ip("switch", "addr add 10.66.0.254/24 dev lan")
        run(*f"ip link add {self._up} type veth peer name up0 netns {switch}".split())
        run(*f"ip addr add {self._subnet}.1/30 dev {self._up}".split())
        run(*f"ip link set {self._up} up".split())
        self.ip("switch", f"addr add {self.service}/30 dev up0")
        self.ip("switch", "link set up0 up")
        for host in HOSTS:
            self._cable("switch", f"p-{host}", host, "lan0")
            self.ip("switch", f"link set p-{host} master lan")
            self.ip(host, f"addr add {lan_address(host)}/24 dev lan0")
            # What no cable reaches goes to the switch, and no further.
            self.ip(host, "route add default via 10.66.0.254")
            self._shape(host)
            self._add_bridge(host)
        for host, other in RING:
            self._cable(host, f"tb-{other}", other, f"tb-{host}")
            for one, far in ((host, other), (other, host)):
                self.ip(one, f"addr add {ring_address(one, far)}/30 dev tb-{far}")
        await self._lay_tunnel()
        source, sink = FORBIDDEN
        # Silent, and answers to the sink's own calls pass: as with any firewall that looks at
        # connections.
        self._drop(sink, f"-s {lan_address(source)} -p tcp --dport {PORT}", on=True)

    async def remove(self) -> None:
        """Take everything away again, as far as it was made."""
        if self._wire is not None and self._wire.stdin is not None:
            self._wire.stdin.close()
            await self._wire.wait()
        for name in ("switch", *HOSTS):
            run("ip", "netns", "del", self.namespace(name), must=False)
        run("ip", "link", "del", self._up, must=False)

    def ip(self, host: str, command: str) -> None:
        """Run an `ip` command in a host."""
        run("ip", "-n", self.namespace(host), *command.split())

    def command(self, host: str, *command: str) -> Sequence[str]:
        """Return the command that runs this one on a host."""
        return ("ip", "netns", "exec", self.namespace(host), *command)

    def set_lan(self, host: str, *, plugged: bool) -> None:
        """Plug a host's LAN cable in, or pull it out at the switch: the host sees no carrier."""
        self.ip("switch", f"link set p-{host} {'up' if plugged else 'down'}")

    def set_ring(self, host: str, other: str, *, plugged: bool) -> None:
        """Let a ring cable carry packets, or lose them without a word: both ends stay up."""
        for one, far in ((host, other), (other, host)):
            self._drop(one, f"-i tb-{far}", on=not plugged)

    def set_parted(self, hosts: Sequence[str], *, parted: bool) -> None:
        """Let no packet pass between these hosts and the others, whichever way; or mend that."""
        for host in hosts:
            for other in HOSTS:
                if other not in hosts:
                    for one, far in ((host, other), (other, host)):
                        self._drop(one, f"-s {lan_address(far)}", on=parted)
                    if (host, other) in RING or (other, host) in RING:
                        self.set_ring(host, other, plugged=not parted)
                    if {host, other} == set(TUNNEL):
                        for one in TUNNEL:
                            self._drop(one, "-i wg0", on=parted)

    async def set_tunnel(self, delay_ms: float, mbit: float) -> None:
        """Make the tunnel slower or faster."""
        assert self._wire is not None
        assert self._wire.stdin is not None
        self._wire.stdin.write(f"{delay_ms} {mbit}\n".encode())
        await self._wire.stdin.drain()

    def _drop(self, host: str, what: str, *, on: bool) -> None:
        """Have a host lose what comes in and matches, without a word; or take it again."""
        command = self.command(host, "iptables", "-w", "-A" if on else "-D", "INPUT")
        run(*command, *what.split(), "-j", "DROP")

    def _cable(self, host: str, interface: str, other: str, far: str) -> None:
        ends = (self.namespace(host), self.namespace(other))
        peer = f"type veth peer name {far} netns {ends[1]}"
        run(*f"ip link add {interface} netns {ends[0]} {peer}".split())
        self.ip(host, f"link set {interface} up")
        self.ip(other, f"link set {far} up")

    def _shape(self, host: str) -> None:
        queue = f"root tbf rate {LAN_MBIT}mbit burst 64kb latency 50ms"
        run("tc", "-n", self.namespace(host), "qdisc", "add", "dev", "lan0", *queue.split())

    def _add_bridge(self, host: str) -> None:
        self.ip(host, "link add docker0 type bridge")
        self.ip(host, f"addr add {BRIDGE_ADDRESS}/16 dev docker0")
        self.ip(host, "link add vethc0 type veth peer name vethc1")
        self.ip(host, "link set vethc0 master docker0")
        for interface in ("vethc0", "vethc1", "docker0"):
            self.ip(host, f"link set {interface} up")

    async def _lay_tunnel(self) -> None:
        ends = [word for host in TUNNEL for word in (self.namespace(host), "wg0")]
        self._wire = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.e2e.wire", *ends, str(TUNNEL_MS), str(TUNNEL_MBIT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._wire.stdout is not None
        assert await self._wire.stdout.readline() == b"ready\n"
        for host in TUNNEL:
            self.ip(host, f"addr add {tunnel_address(host)}/30 dev wg0")
            self.ip(host, "link set wg0 up")


def run(*command: str, must: bool = True) -> None:
    """Run a command; when it must succeed and fails, raise with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if must and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
