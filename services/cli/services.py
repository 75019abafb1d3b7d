"""Shardring's processes as services of the system: what has to be there, and what is run.

Plain data and decisions; `services.cli.commands.install` carries them out. What is done on macOS is
written after launchd's and launchctl's documentation and tested on the files, not on a Mac.
"""

import plistlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from xml.sax.saxutils import escape

NAMES = ("topology", "downloads", "placement", "node")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a unit's processes are shown of the certificate's files, which only root may read.
_CREDENTIALS = {"SHARDRING_TLS_CERT": "cert", "SHARDRING_TLS_KEY": "key", "SHARDRING_TLS_CA": "ca"}


@dataclass(frozen=True)
class Wish:
    """What is to be installed.

    `program`: the `shardring` to run. `host`: the address to listen on. `environment`: variables.
    `user`, `home`: whose a Mac's daemons are; systemd makes users of its own.
    """

    names: tuple[str, ...]
    program: str
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    home: str = ""


@dataclass(frozen=True)
class Places:
    """Where a system keeps services. `file`: name of a service -> its file."""

    system: str  # "systemd" or "launchd"
    folder: PurePosixPath
    # Folders that services write to; all of them go with the last service.
    state: tuple[PurePosixPath, ...]
    # Owned by the user that runs them, so made beforehand.
    made: tuple[PurePosixPath, ...] = ()

    def file(self, name: str) -> PurePosixPath:
        """Return where a service's file is."""
        return self.folder / self.template(name)

    def template(self, name: str) -> str:
        """Return what a service's file is called, here and in deploy/."""
        if self.system == "launchd":
            return f"dev.shardring.{name}.plist"
        return f"shardring-{name}.service"


_MAC_STATE = PurePosixPath("/Library/Application Support/Shardring")
_MAC_LOGS = PurePosixPath("/Library/Logs/Shardring")
SYSTEMD = Places(
    "systemd",
    PurePosixPath("/etc/systemd/system"),
    # With DynamicUser= the second is a link to the first.
    state=(PurePosixPath("/var/lib/private/shardring"), PurePosixPath("/var/lib/shardring")),
)
LAUNCHD = Places(
    "launchd",
    PurePosixPath("/Library/LaunchDaemons"),
    state=(_MAC_STATE, _MAC_LOGS),
    made=(_MAC_STATE, _MAC_LOGS),
)


def filled(places: Places, name: str, template: str, wish: Wish) -> str:
    """Return a service's file. Raises ValueError for what such a file cannot hold."""
    for text in (wish.program, wish.host, *wish.environment, *wish.environment.values()):
        if re.search(r"[\0-\x1f\x7f]", text):
            raise ValueError(f"{text!r} holds a control character.")
    for variable in wish.environment:
        if not _NAME.fullmatch(variable):
            raise ValueError(f"{variable!r} is no name of a variable.")
    if places.system == "launchd":
        return _plist(template, wish)
    return _unit(template, wish)


def _unit(template: str, wish: Wish) -> str:
    lines = [
        f"LoadCredential={_CREDENTIALS[name]}:{_specifiers(value)}"
        if name in _CREDENTIALS
        else f"Environment={_quoted(f'{name}={value}')}"
        for name, value in wish.environment.items()
    ]
    lines += [
        f"Environment={name}=%d/{file}"
        for name, file in _CREDENTIALS.items()
        if name in wish.environment
    ]
    # There, and only there, variables are put in.
    words = {"@PROGRAM@": wish.program, "@HOST@": _host(wish.host)}
    text = template
    for word, value in words.items():
        text = text.replace(word, _quoted(value.replace("$", "$$")))
    # Before the person's own file, which has the last word.
    return text.replace("EnvironmentFile=", "\n".join([*lines, "EnvironmentFile="]), 1)


def _plist(template: str, wish: Wish) -> str:
    given = {
        "PROGRAM": wish.program,
        "HOST": _host(wish.host),
        "USER": wish.user,
        "HOME": wish.home,
        "STATE": str(_MAC_STATE),
        "LOGS": str(_MAC_LOGS),
    }
    text = re.sub("@([A-Z]+)@", lambda found: escape(given[found[1]]), template)
    daemon = plistlib.loads(text.encode())
    daemon["EnvironmentVariables"] |= wish.environment
    return plistlib.dumps(daemon, sort_keys=False).decode()


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Return a word of a unit's line."""
    plain = _specifiers(text).replace("\\", "\\\\")
    if re.fullmatch(r"[\w@%+=:,./\[\]$-]+", plain):
        return plain
    return '"' + plain.replace('"', '\\"') + '"'


def start_commands(places: Places, names: Sequence[str]) -> list[list[str]]:
    """Return what starts services whose files are there, now and with the machine."""
    if places.system == "systemd":
        units = [places.template(name) for name in names]
        return [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", *units],
            # Also those that run, with what was changed.
            ["systemctl", "restart", *units],
        ]
    return [
        command
        for name in names
        for command in (
            ["launchctl", "bootout", f"system/dev.shardring.{name}"],
            ["launchctl", "enable", f"system/dev.shardring.{name}"],
            ["launchctl", "bootstrap", "system", str(places.file(name))],
        )
    ]


def stop_commands(places: Places, names: Sequence[str]) -> list[list[str]]:
    """Return what stops services and keeps them from starting; before their files are removed."""
    if places.system == "systemd":
        return [["systemctl", "disable", "--now", *map(places.template, names)]] if names else []
    return [["launchctl", "bootout", f"system/dev.shardring.{name}"] for name in names]


def after_commands(places: Places, names: Sequence[str]) -> list[list[str]]:
    """Return what has the system forget services whose files are gone."""
    if places.system == "systemd":
        units = [places.template(name) for name in names]
        # One that failed is listed until then.
        return [["systemctl", "daemon-reload"], ["systemctl", "reset-failed", *units]]
    return []


def may_fail(command: Sequence[str]) -> bool:
    """Return whether a command fails where there is nothing for it to do."""
    return command[:2] in (["launchctl", "bootout"], ["systemctl", "reset-failed"])


def shown(command: Sequence[str]) -> str:
    """Return a command as a person would type it."""
    return shlex.join(command)
