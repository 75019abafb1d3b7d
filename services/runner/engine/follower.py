"""Any rank but 0: does its part of each step, and hands it on."""

from collections.abc import Callable

import mlx.core as mx

from services.runner.child_protocol import Event
from services.runner.engine.line import decode
from services.runner.engine.ring import Op, Ring, Step
from services.runner.engine.work import REPORT_SECONDS, Work


class Follower:
    """Works on what the rank before sends. `is_split`: every rank holds a part of every layer."""

    def __init__(
        self,
        work: Work,
        ring: Ring,
        send: Callable[[Event], None],
        *,
        is_split: bool,
    ) -> None:
        self._work, self._ring, self._send = work, ring, send
        self._is_split = is_split
        # None: nothing was reported yet.
        self._was_working: bool | None = None

    def serve(self) -> None:
        """Work until something fails. Raises what the ring or the model raise."""
        while True:
            working = self._work.sequence_count > 0
            if working != self._was_working or (
                working and self._work.busy.seconds >= REPORT_SECONDS
            ):
                self._was_working = working
                self._send(self._work.usage(working=working))
            if self._ring.wait(REPORT_SECONDS if working else None):
                if not working:
                    self._work.busy.read()  # the time it slept counts for nothing
                self.step()

    def step(self) -> Op:
        """Take one step from the rank before, do it, and hand it on; return what it was."""
        step = self._ring.receive()
        if self._is_split and not self._ring.is_last:
            self._ring.send(step)
        with self._work.busy.computing():
            self._work.apply(decode(step.commands))
            if self._is_split:
                self._compute_part(step)
            else:
                self._compute_stage(step)
        return step.op

    def _compute_stage(self, step: Step) -> None:
        result: mx.array | None = None
        if step.data is not None and step.op is Op.PREFILL:
            result = self._work.prefill(step.target, step.data)
        elif step.data is not None:
            result = self._work.decode(step.target, step.data)
        if not self._ring.is_last:
            self._ring.send(Step(step.op, step.target, step.commands, result))
        elif step.op is Op.PREFILL:
            self._ring.send_answer(mx.zeros(1, mx.int32))
        elif result is not None:
            self._ring.send_answer(result)
        self._work.tidy(prompt=step.op is Op.PREFILL)

    def _compute_part(self, step: Step) -> None:
        if step.data is None:
            return
        tokens = step.data[..., 0]
        if step.op is Op.PREFILL:
            self._work.prefill(step.target, tokens)
        else:
            mx.eval(self._work.decode(step.target, tokens))
        self._work.tidy(prompt=step.op is Op.PREFILL)
