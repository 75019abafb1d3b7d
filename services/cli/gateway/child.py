"""The process in which smg runs: `python -m services.cli.gateway.child FOLDER SMG-OPTIONS`.

It ends when its standard input does: with the process that started it, however that ends. FOLDER
is then removed.
"""

import os
import shutil
import signal
import sys
import threading
import time

# Beyond what smg gives its requests to end.
_MORE_SECONDS = 5.0
GRACE_SECONDS = 3


def main() -> None:
    """Run smg until SIGTERM or the end of standard input. Exits with 1 when it fails."""
    folder, *options = sys.argv[1:]
    threading.Thread(
        target=_end_with_stdin, args=[folder], name="end with stdin", daemon=True
    ).start()
    from smg import launch_router  # the extra `gateway`, and slow to import

    # A picture of some thirty lines.
    launch_router.print_banner = lambda *_: None
    try:
        launch_router.launch_router(launch_router.parse_router_args(options))
    except (RuntimeError, ValueError):
        sys.exit(1)  # smg has told why


def _end_with_stdin(folder: str) -> None:
    while os.read(0, 1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS + _MORE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
