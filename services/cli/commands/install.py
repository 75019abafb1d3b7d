"""`shardring install` and `shardring uninstall`."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import click

from services.cli.services import (
    LAUNCHD,
    NAMES,
    SYSTEMD,
    Places,
    Wish,
    after_commands,
    filled,
    may_fail,
    shown,
    start_commands,
    stop_commands,
)
from services.common.options import with_options
from services.common.security import ServerOptions, security_of

# What `launchctl bootout` ended may take a while to be gone; until then there is no new start.
_BOOTSTRAP_SECONDS = 30.0
# Where the system's files are.
_ROOT = Path("/")
_TLS = ("tls_cert", "tls_key", "tls_ca")


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(NAMES), metavar="NAME...")
@click.option("--join", default="", help="For a node: the host that runs the services.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="VARIABLE=VALUE",
    help="Further variable of the services, such as SHARDRING_MEMORY_GB=64.",
)
@click.option(
    "--user", default="", help="On a Mac: whose the daemons are.  [default: who called sudo]"
)
@click.option("--dry-run", is_flag=True, help="Show what would be written and run; do nothing.")
@with_options(ServerOptions)
def install(
    options: ServerOptions,
    names: tuple[str, ...],
    join: str,
    host: str,
    settings: tuple[str, ...],
    user: str,
    dry_run: bool,
) -> None:
    """Have the system run Shardring's processes from now on: topology, downloads, placement, node.

    With systemd on Linux, with launchd on a Mac. A second time it changes what was installed.
    """
    refusal = security_of(options).check_listen(host)
    if refusal:
        raise click.ClickException(refusal)
    places = _places()
    if places is SYSTEMD and (closed := closed_folder(*_read_by_services())):
        raise click.ClickException(
            f"{closed} is closed to other users, and systemd runs services as users of their own. "
            "Have Shardring and its Python where everybody may read them, such as /opt/shardring."
        )
    user, home = _owner(user) if places is LAUNCHD else ("", "")
    wish = Wish(
        tuple(dict.fromkeys(names)),
        _program(),
        host,
        _environment(options, join, settings),
        user,
        home,
    )
    try:
        files = {
            places.file(name): filled(places, name, _template(places, name), wish)
            for name in wish.names
        }
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    system = _System(dry_run)
    for folder in places.made:
        system.make_folder(folder, user)
    for path, text in files.items():
        system.write(path, text)
    for command in start_commands(places, wish.names):
        system.run(command)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[NAME...]")
@click.option("--keep-data", is_flag=True, help="Leave the node's identity, its models, and logs.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed and run; do nothing.")
def uninstall(names: tuple[str, ...], keep_data: bool, dry_run: bool) -> None:
    """Take away what `shardring install` brought; without names all of it.

    With the last service also what they have written: the node's identity, models, logs.
    """
    places, system = _places(), _System(dry_run)
    present = [name for name in NAMES if system.exists(places.file(name))]
    going = [name for name in present if not names or name in names]
    for command in stop_commands(places, going):
        system.run(command)
    for name in going:
        system.remove(places.file(name))
    if going:
        for command in after_commands(places, going):
            system.run(command)
    if not keep_data and set(present) == set(going):
        for folder in places.state:
            system.remove(folder)


class _System:
    """Carries things out, or only says what it would do."""

    def __init__(self, dry_run: bool) -> None:
        self._dry_run = dry_run
        if not dry_run and os.geteuid() != 0:
            raise click.ClickException("This changes the system: run it with sudo, or --dry-run.")

    def exists(self, path: PurePosixPath) -> bool:
        return _real(path).exists()

    def make_folder(self, path: PurePosixPath, user: str) -> None:
        def make() -> None:
            _real(path).mkdir(mode=0o755, exist_ok=True)
            shutil.chown(_real(path), user)

        self._do(f"folder {path}, of {user}", make)

    def write(self, path: PurePosixPath, text: str) -> None:
        def write() -> None:
            fresh = _real(path).with_name(f"{path.name}.new")
            # launchd takes no file that others than root may write.
            fresh.touch(mode=0o644)
            fresh.write_text(text)
            fresh.replace(_real(path))

        self._do(f"{path}:\n{text}" if self._dry_run else str(path), write)

    def remove(self, path: PurePosixPath) -> None:
        real = _real(path)
        if not real.exists() and not real.is_symlink():
            return

        def remove() -> None:
            if real.is_symlink() or not real.is_dir():
                real.unlink()
            else:
                shutil.rmtree(real)

        self._do(f"remove {path}", remove)

    def run(self, command: Sequence[str]) -> None:
        self._do(shown(command), lambda: _run(command))

    def _do(self, words: str, work: Callable[[], None]) -> None:
        click.echo(words)
        if not self._dry_run:
            try:
                work()
            except OSError as error:
                raise click.ClickException(f"{words}: {error.strerror or error}") from error


def _real(path: PurePosixPath) -> Path:
    return _ROOT / path.relative_to("/")


def _run(command: Sequence[str]) -> None:
    until = time.monotonic() + _BOOTSTRAP_SECONDS
    while True:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode == 0 or may_fail(command):
            return
        if command[:2] != ["launchctl", "bootstrap"] or time.monotonic() > until:
            words = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
            raise click.ClickException(f"{shown(command)}: {words}")
        time.sleep(0.5)


def _places() -> Places:
    if sys.platform == "darwin":
        return LAUNCHD
    if shutil.which("systemctl") is None:
        raise click.ClickException("There is neither systemd nor launchd here to run services.")
    return SYSTEMD


def _program() -> str:
    """Return the `shardring` of the environment that this runs in."""
    program = Path(sys.executable).parent / "shardring"
    if not program.exists():
        raise click.ClickException(f"There is no {program}: is Shardring installed beside Python?")
    return str(program)


def _read_by_services() -> tuple[Path, ...]:
    """Return what a service has to read: its program, its Python, the code."""
    return (Path(_program()), Path(sys.executable).resolve(), Path(__file__).resolve())


def closed_folder(*paths: Path) -> Path | None:
    """Return the first folder above these files that others may not enter, or None."""
    for path in paths:
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                return folder
    return None


def _template(places: Places, name: str) -> str:
    """Return a service's file from deploy/, of the clone or of the installed package."""
    own = Path(__file__).resolve().parents[1]
    for deploy in (own / "deploy", own.parents[1] / "deploy"):
        with contextlib.suppress(FileNotFoundError):
            return (deploy / places.system / places.template(name)).read_text()
    raise click.ClickException(f"{places.template(name)} was not installed with this program.")


def _owner(user: str) -> tuple[str, str]:
    """Return the user whose daemons a Mac runs, and the home folder."""
    import pwd

    name = user or os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    try:
        return name, pwd.getpwnam(name).pw_dir
    except KeyError as error:
        raise click.ClickException(f"There is no user {name} here.") from error


def _environment(options: ServerOptions, join: str, settings: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that say what the options do."""
    variables: dict[str, str] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise click.UsageError(f"--set takes VARIABLE=VALUE, not {setting!r}.")
        variables[name] = value
    if join:
        variables["SHARDRING_JOIN"] = join
    for field in _TLS:
        if value := getattr(options, field):
            variables[f"SHARDRING_{field.upper()}"] = str(Path(value).expanduser().resolve())
    if options.insecure:
        variables["SHARDRING_INSECURE"] = "1"
    if options.allow:
        variables["SHARDRING_ALLOW"] = " ".join(options.allow)
    return variables
