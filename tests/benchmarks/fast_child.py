"""A shard's child whose engine emits tokens as fast as its parent takes them.

Everything but the engine is the real child: its process, its threads, its socket, its messages.
A request's seed other than 0 is a pace instead, in tokens per second; the text of each token is
then the moment at which it was sent (time.monotonic, which all processes of a machine share).
"""

import itertools
import select
import time
from collections import deque
from collections.abc import Callable

from services.runner import child
from services.runner.child_protocol import Cancel, Event, Finished, Load, Run, Started, Tokens
from services.runner.domain.request import GenerationRequest
from services.runner.engine.inbox import Inbox

# Sequences that get a token in the same step, as of 32 running ones in a ring of three, where they
# are in four lanes. Larger lanes would make it easier: each step is one message.
LANE_SIZE = 8
_TEXTS = (" the", " ring", " of", " several", ",", " ranks", ".", " Each")


class FastEngine:
    """Stands in for `ShardEngine`: prompts take no time, and a token none but its message's."""

    has_chat_template = False

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self._inbox: Inbox[Run | Cancel] = Inbox()
        self._left: dict[str, int] = {}

    def connect(self, rank: int, hosts: tuple[str, ...]) -> None:
        """Do nothing: this is a ring of one."""

    def load(self, command: Load) -> int:
        """Load nothing."""
        return 0

    def warm_up(self) -> tuple[int, float]:
        """Do nothing."""
        return 0, 0.0

    def prepare(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the prompt's tokens, which must be given as such."""
        return request.input.token_ids or ()

    def tell(self, item: Run | Cancel) -> None:
        """Take a request, or that one is to end."""
        self._inbox.put(item)

    def serve(self) -> None:
        """Give one lane after the other a token for each of its sequences, without a pause."""
        lanes: deque[list[Run]] = deque()
        for step in itertools.count():
            for item in self._inbox.take():
                self._take(item, lanes)
            if not lanes:
                select.select([self._inbox.descriptor], [], [])
                continue
            lane = lanes.popleft()
            token, text = step % 1000, _TEXTS[step % len(_TEXTS)]
            if pace := lane[0].sampling.seed:
                time.sleep(1 / pace)
                text = f"{time.monotonic()} "
            pieces = tuple((run.request_id, (token,), text, None) for run in lane)
            self._send(Tokens(pieces))
            for run in lane:
                self._left[run.request_id] -= 1
                if not self._left[run.request_id]:
                    self._finish(run)
            lane = [run for run in lane if run.request_id in self._left]
            if lane:
                lanes.append(lane)

    def _take(self, item: Run | Cancel, lanes: deque[list[Run]]) -> None:
        if isinstance(item, Cancel):
            raise NotImplementedError("nothing is cancelled here")
        self._send(Started(item.request_id))
        self._left[item.request_id] = item.max_token_count
        if all(len(lane) == LANE_SIZE for lane in lanes):
            lanes.append([])
        min(lanes, key=len).append(item)

    def _finish(self, run: Run) -> None:
        del self._left[run.request_id]
        count = run.max_token_count
        self._send(Finished(run.request_id, "length", "", count, 0, 0.0, 0.0, 0.0))


if __name__ == "__main__":
    vars(child)["ShardEngine"] = FastEngine
    child.main()
