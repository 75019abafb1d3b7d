"""A shard's child process: the only process of Shardring that runs MLX.

Started by `services.runner.supervisor`, spoken to over a socket (`child_protocol`). The main thread
does the work and blocks while there is none; a second thread listens, so that requests are
cancelled while the main thread computes, and so that this process ends at once when its parent is
gone. A third prepares inputs: long ones, and odd templates, take their time.
"""

import argparse
import ctypes
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagate import extract
from opentelemetry.trace import Span

from services.common.errors import Reason, ShardringError
from services.common.logs import start_logging
from services.common.telemetry import start_telemetry
from services.runner.child_protocol import (
    Cancel,
    Command,
    Connect,
    Connected,
    Event,
    Exit,
    Failed,
    Load,
    Loaded,
    Prepare,
    Prepared,
    Ready,
    Refused,
    Run,
    WarmUp,
    decode,
    encode,
)
from services.runner.engine.shard import LoadError, ShardEngine

logger = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)

_PR_SET_PDEATHSIG = 1


class Child:
    """Carries out commands in order; requests are taken at any time, and Exit out of turn.

    `flush` sends off the telemetry.
    """

    def __init__(
        self, control: socket.socket, trace_context: Context, flush: Callable[[], object]
    ) -> None:
        self._control = control
        self._flush = flush
        self._start_context = trace_context
        self._commands: queue.Queue[Command] = queue.Queue()
        self._to_prepare: queue.Queue[Prepare] = queue.Queue()
        self._sending = threading.Lock()
        self._engine = ShardEngine(self._send)

    def run(self) -> None:
        """Work until something fails, which is reported; Exit ends the process meanwhile."""
        for work in (self._listen, self._prepare_all):
            threading.Thread(target=_lasting, args=(work,), daemon=True).start()
        while True:
            command = self._commands.get()
            try:
                self._do(command)
            except LoadError as error:
                self._send(Failed(error.reason, str(error)))
                return
            except Exception as error:
                logger.exception("%s failed", type(command).__name__)
                text = f"{type(command).__name__}: {error}" if str(error) else repr(error)
                self._send(Failed(Reason.SHARD_FAILED, text))
                return

    def _do(self, command: Command) -> None:
        match command:
            case Connect():
                with self._span("ring init"):
                    self._engine.connect(command.rank, command.hosts)
                self._send(Connected())
                logger.info("Connected.")
            case Load():
                with self._span("load"):
                    memory = self._engine.load(command)
                self._send(Loaded(memory))
                logger.info("Loaded %d bytes.", memory)
            case WarmUp():
                with self._span("warm-up"):
                    memory, step_seconds = self._engine.warm_up()
                self._send(Ready(memory, self._engine.has_chat_template, step_seconds))
                logger.info("Ready: the warm-up took %.2f s.", step_seconds)
                self._engine.serve()

    def _span(self, name: str) -> AbstractContextManager[Span]:
        return tracer.start_as_current_span(name, context=self._start_context)

    def _listen(self) -> None:
        # The parent holds the other end for as long as it lives; whatever the main thread is in,
        # even a collective that never returns, must not outlive it, nor hold up its stop.
        with self._control.makefile("rb") as lines:
            for line in lines:
                match decode(line):
                    case Run() | Cancel() as item:
                        self._engine.tell(item)
                    case Exit():
                        self._flush()
                        break
                    case Prepare() as command:
                        self._to_prepare.put(command)
                    case command:
                        self._commands.put(command)
        os._exit(0)

    def _prepare_all(self) -> None:
        while True:
            self._prepare(self._to_prepare.get())

    def _prepare(self, command: Prepare) -> None:
        event: Event
        try:
            event = Prepared(command.request_id, self._engine.prepare(command.request))
        except ShardringError as error:
            event = Refused(command.request_id, error.reason, error.message, error.metadata)
        except BaseException:
            # One poisoned input must not take the instance with it, even one that makes the
            # tokenizer's Rust code panic, which is no Exception.
            logger.exception("Preparing an input failed")
            event = Refused(
                command.request_id, Reason.INTERNAL, "The input broke the tokenizer.", {}
            )
        self._send(event)

    def _send(self, event: Event) -> None:
        with self._sending:
            self._control.sendall(encode(event))


def _lasting(work: Callable[[], None]) -> None:
    """Run a thread that lasts as long as the process: when it fails, for want of memory for
    example, so does the process, which otherwise would be deaf and never known to be."""
    try:
        work()
    except BaseException:
        try:
            logger.exception("A thread failed")
        finally:
            os._exit(1)


def _die_with_parent() -> None:
    """Have Linux kill this process with its parent, even while it is stopped by a signal.

    Elsewhere, and should the parent be gone already, the closed control socket ends it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run a child; started as `python -m services.runner.child`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--node", required=True)
    arguments = parser.parse_args()
    _die_with_parent()
    # A crash inside MLX leaves its stack in the log, which is kept with the instance.
    faulthandler.enable(all_threads=False)
    start_logging("info")
    provider = start_telemetry(
        "shardring-shard",
        instance_id=arguments.instance,
        rank=str(arguments.rank),
        node_id=arguments.node,
    )
    control = socket.socket(fileno=arguments.control_fd)
    carrier = {key.lower(): os.environ.get(key, "") for key in ("TRACEPARENT", "TRACESTATE")}
    status = 0
    try:
        Child(control, extract(carrier), provider.shutdown).run()
        provider.shutdown()
    except Exception:
        logger.exception("Failed, with nobody to tell")
        status = 1
    # MLX's ring threads may be waiting for a peer that is gone; there is nothing left to lose.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
