"""`make demo`: the whole of Shardring on this machine, in about half a minute.

Three services and three nodes as processes, a model fetched to each node, a ring of three MLX
ranks, three questions answered, the trace of it all. Exits with 0 only if every answer is right.
"""

import signal
import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the demo; exit with 0 if every answer was right."""
    # Nothing has been started yet: while the rest is imported, Ctrl-C may simply end this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run() -> NoReturn:
    import asyncio
    import tempfile
    from pathlib import Path

    from rich.console import Console

    from services.cli.lab import LabError
    from services.cli.walkthrough import run
    from services.common.errors import ShardringError
    from services.common.logs import start_logging

    start_logging("error")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="shardring-demo-") as folder:
        try:
            right = asyncio.run(run(console, Path(folder)))
        except asyncio.CancelledError:
            console.print("Interrupted; everything that was started is stopped.")
            sys.exit(INTERRUPTED)
        except TimeoutError:
            sys.exit("The nodes did not find each other in time.")
        except (ShardringError, LabError) as error:
            sys.exit(str(error))
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
