"""A ring that computes nothing: it follows a schedule's commands on lists of tokens.

Every rank of a real ring carries out the same commands in the same order, so one list a sequence
stands for the caches of all ranks. A made-up model chooses tokens from what the caches hold.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.runner.domain.cache_room import CacheCost, CacheRoom
from services.runner.domain.schedule import Schedule
from services.runner.domain.steps import Command, Decode, Prefill, Sequence, Step

VOCABULARY = 5


@dataclass(frozen=True)
class Held:
    """A token in a cache, and the step that put it there: positions [start, end) of `rows` rows."""

    token: int
    start: int
    end: int
    rows: int


Cache = list[Held]


def chosen(tokens: list[int]) -> int:
    """Return the made-up model's next token."""
    return (sum(tokens) * 7 + len(tokens) * 3 + tokens[-1]) % VOCABULARY


def alone(prompt: list[int], count: int) -> list[int]:
    """Return the prompt and the answer the made-up model gives to it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chosen(tokens))
    return tokens


class PlainRing:
    """Carries steps out when they are issued; answers come back later, in the same order."""

    def __init__(
        self,
        costs: list[CacheCost],
        trimmable_below: int | None,
        count_of: Callable[[int], int],
    ) -> None:
        """`count_of` returns how many tokens a sequence has: what its sampler is told."""
        self.costs, self.trimmable_below, self._count_of = costs, trimmable_below, count_of
        # Where the token stands that a sequence's sampler chooses next.
        self.positions: dict[int, int] = {}
        self.prompts: dict[int, Cache] = {}
        self.lanes: dict[int, dict[int, Cache]] = {}
        self.kept: dict[int, Cache] = {}
        self.last: dict[int, list[int]] = {}
        self.answers: deque[list[int]] = deque()

    def carry_out(self, step: Step) -> None:
        """Do what a step says; fails where that cannot be done."""
        for command in step.commands:
            self._apply(command)
        match step:
            case Prefill(sequence=sequence, tokens=tokens):
                cache = self.prompts[sequence.sequence_id]
                start = len(cache)
                assert tokens == sequence.tokens[start : start + len(tokens)], "not what is next"
                cache += [Held(t, start, start + len(tokens), 1) for t in tokens]
                self.answers.append([])
            case Decode():
                self._decode(step)
        self._check_room()

    def _decode(self, step: Decode) -> None:
        rows = self.lanes[step.lane_id]
        assert list(rows) == [s.sequence_id for s in step.sequences], "another order of rows"
        fed = self.last[step.lane_id] if step.tokens is None else step.tokens
        answer = []
        for sequence, token, cache in zip(step.sequences, fed, rows.values(), strict=True):
            at = len(cache)
            assert sequence.computed == at + 1, "the schedule is mistaken about what is computed"
            cache.append(Held(token, at, at + 1, len(rows)))
            position = self.positions[sequence.sequence_id]
            assert position == at + 1, "its sampler is about another token"
            self.positions[sequence.sequence_id] += 1
            tokens = [held.token for held in cache]
            assert len(tokens) < sequence.limit, "a step for a token beyond its limit"
            # The token that is fed is the sequence's own, or will be once its step came back.
            known = sequence.tokens[: len(tokens)]
            assert tokens[: len(known)] == known, "not the sequence's own tokens"
            answer.append(chosen(tokens))
        self.last[step.lane_id] = answer
        self.answers.append(answer)

    def _apply(self, command: list[int | str]) -> None:
        name, *rest = command
        numbers = [int(n) for n in rest]
        match name, numbers:
            case Command.OPEN, [sequence, entry, length]:
                held = self.kept[entry] if entry else []
                assert entry or not length
                if length < len(held):
                    below = self.trimmable_below
                    assert below is None or len(held) < below, "cannot be cut back"
                assert sequence not in self.prompts
                assert len(held) >= length
                self.prompts[sequence] = held[:length]
                self.positions[sequence] = self._count_of(sequence)
            case Command.KEEP, [sequence, entry]:
                assert entry not in self.kept
                self.kept[entry] = list(self.prompts[sequence])
            case Command.JOIN, [sequence, lane]:
                self.lanes.setdefault(lane, {})[sequence] = self.prompts.pop(sequence)
            case Command.LEAVE, [sequence, lane, entry]:
                taken = self._take_out(sequence, lane)
                del self.positions[sequence]
                if entry:
                    assert entry not in self.kept
                    self.kept[entry] = taken
            case Command.MOVE, [sequence, lane, to]:
                self.lanes.setdefault(to, {})[sequence] = self._take_out(sequence, lane)
            case Command.CLOSE, [sequence]:
                del self.prompts[sequence], self.positions[sequence]
            case Command.DROP, [entry]:
                del self.kept[entry]
            case _:
                raise AssertionError(f"unknown command {command}")

    def _take_out(self, sequence: int, lane: int) -> Cache:
        taken = self.lanes[lane].pop(sequence)
        if not self.lanes[lane]:
            del self.lanes[lane]
            self.last.pop(lane, None)
        return taken

    def _check_room(self) -> None:
        held = [len(cache) for cache in (*self.prompts.values(), *self.kept.values())]
        for rows in self.lanes.values():
            held += [max(len(cache) for cache in rows.values())] * len(rows)
        for cost in self.costs:
            assert sum(map(cost.bytes_for, held)) <= cost.limit_bytes, "more than there is room for"


class World:
    """A schedule, its ring, and the clients, who all get what they would get alone."""

    def __init__(
        self,
        costs: list[CacheCost],
        *,
        lane_count: int,
        window: int,
        ahead: bool,
        batched: bool,
        chunk: int,
    ) -> None:
        self.room = CacheRoom(costs)
        self.ring = PlainRing(costs, self.room.trimmable_below, self._count_of)
        self.schedule = Schedule(
            self.room,
            lane_count=lane_count,
            window=window,
            ahead=ahead,
            batched=batched,
            chunk_tokens=chunk,
        )
        self.window, self.chunk = window, chunk
        self.issued: deque[Step] = deque()
        self.log: list[Step] = []
        self.open: dict[int, tuple[Sequence, list[int]]] = {}
        self.finished: list[Sequence] = []
        self._last_id = 0
        # Lanes that were there when a chunk's worth of prompts had gone by.
        self._owed: set[int] = set()
        self._prompt_tokens = 0
        self._stepped: set[int] = set()
        # By sequence: others whose turn comes before its next chunk.
        self._before: dict[int, set[tuple[int, int]]] = {}

    def submit(self, prompt: list[int], count: int, *, exact: bool = False) -> Sequence | None:
        """Ask for `count` tokens; None: refused, as the ring can never hold them."""
        total = len(prompt) + count
        if self.room.shortage(total) is not None:
            return None
        self._last_id += 1
        sequence = Sequence(self._last_id, list(prompt), total, exact=exact)
        self.open[self._last_id] = sequence, alone(prompt, count)
        self.schedule.submit(sequence)
        return sequence

    def issue(self) -> Step | None:
        """Issue the schedule's next step, if there is one."""
        step = self.schedule.next_step()
        if step is None:
            return None
        self.ring.carry_out(step)
        self.log.append(step)
        if isinstance(step, Prefill | Decode):
            self.issued.append(step)
        assert len(self.issued) <= self.window
        if isinstance(step, Prefill):
            self._check_turns(step)
        elif isinstance(step, Decode):
            self._stepped.add(step.lane_id)
            for sequence in step.sequences:
                if sequence.exact:
                    self._check_exact(sequence, len(step.sequences))
        return step

    def arrive(self) -> None:
        """Have the oldest step come back."""
        step = self.issued.popleft()
        answer = self.ring.answers.popleft()
        for sequence, place, token in self.schedule.done(step, answer):
            assert isinstance(step, Decode)
            assert step.sequences[place] is sequence
            assert token == answer[place]
            expected = self.open[sequence.sequence_id][1]
            assert sequence.tokens == expected[: len(sequence.tokens)], "not what it gets alone"
            if len(sequence.tokens) == len(expected):
                self.finished.append(sequence)
                self.end(sequence, keep=True)

    def end(self, sequence: Sequence, *, keep: bool = False) -> None:
        """End a sequence that has not ended."""
        del self.open[sequence.sequence_id]
        self.schedule.end(sequence, keep=keep)

    def _count_of(self, sequence_id: int) -> int:
        known = self.open.get(sequence_id)
        return 0 if known is None else len(known[0].tokens)

    def drain(self) -> None:
        """Go on until nothing is left to do; every sequence ends."""
        # No sequence is set back more often than others have tokens.
        tokens = sum(len(expected) for _, expected in self.open.values())
        for _ in range(200 + 50 * tokens):
            while self.issue() is not None:
                pass
            if self.issued:
                self.arrive()
            elif not self.open:
                break
        assert not self.open, "some never ended"
        assert self.schedule.is_idle
        assert not self.ring.prompts
        assert not self.ring.lanes
        assert not self.ring.last
        assert not self.ring.positions
        assert not self.ring.answers

    def _check_turns(self, step: Prefill) -> None:
        """Lanes get a step after each chunk's worth of prompts, and prompts take turns."""
        left_out = self._owed & set(self.ring.lanes) - self._stepped
        assert not left_out, "a lane got no step after a chunk's worth of prompts"
        self._owed.clear()
        self._prompt_tokens += len(step.tokens)
        if self._prompt_tokens >= self.chunk:
            self._owed, self._stepped = set(self.ring.lanes), set()
            self._prompt_tokens = 0
        me = (step.sequence.sequence_id, step.sequence.attempt)
        waiting = {
            (s.sequence_id, s.attempt)
            for s, _ in self.open.values()
            if s.sequence_id in self.ring.prompts and s.prompt_left > 0
        }
        assert not self._before.get(step.sequence.sequence_id, set()) & waiting, "not its turn"
        for others in self._before.values():
            others.discard(me)
        self._before[step.sequence.sequence_id] = waiting - {me}

    def _check_exact(self, sequence: Sequence, rows: int) -> None:
        """It is computed as it would be if there were no other."""
        assert rows == 1
        prompt = sequence.prompt_count - 1
        name = sequence.sequence_id
        [cache] = [lane[name] for lane in self.ring.lanes.values() if name in lane]
        for at, held in enumerate(cache):
            start = at // self.chunk * self.chunk
            end = min(start + self.chunk, prompt)
            expected = (start, end) if at < prompt else (at, at + 1)
            assert (held.start, held.end, held.rows) == (*expected, 1), "not as if alone"
