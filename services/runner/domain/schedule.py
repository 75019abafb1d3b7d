"""What a ring computes next: which sequences run, in which lanes, and whose turn it is.

Sequences wait, then their prompts are computed chunk by chunk, then they join a lane: a batch
whose sequences each get one token a step. Several lanes are on their way through the ring at once,
so that every stage works. After each chunk's worth of prompts every lane gets a step, and prompts
take turns, so neither long prompts nor long answers hold up the others.

Everything here is decided on the head. What the other ranks have to know travels with the steps, as
commands.
"""

from collections import deque
from dataclasses import dataclass, field

from services.runner.domain.cache_room import CacheRoom, round_up
from services.runner.domain.prefixes import MIN_TOKENS, Found, Prefixes, common_length
from services.runner.domain.steps import Command, Commands, Decode, Prefill, Sequence, Step, Tidy

PREFILL_CHUNK_TOKENS = 256
MAX_RUNNING = 32
MAX_PREFILLING = 8
# Room is set aside for so many tokens at a time.
_GROWTH_TOKENS = 512


@dataclass(eq=False)
class _Lane:
    lane_id: int
    sequences: list[Sequence] = field(default_factory=list)
    on_their_way: int = 0
    # Sequences came or went since its last step.
    changed: bool = True

    @property
    def is_shared(self) -> bool:
        return not any(sequence.exact for sequence in self.sequences)


class Schedule:
    """The sequences of one instance.

    `lane_count` lanes are filled before one gets a second sequence. At most `window` steps are on
    their way. `ahead`: a lane's next step may be issued before its last one's tokens are known.
    `batched` False: every sequence has a lane of its own.
    """

    def __init__(
        self,
        room: CacheRoom,
        *,
        lane_count: int,
        window: int,
        ahead: bool,
        batched: bool,
        chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    ) -> None:
        self._room = room
        self._lane_count, self._window, self._ahead = lane_count, window, ahead
        self._batched, self._chunk = batched, chunk_tokens
        self._prefixes = Prefixes(room.trimmable_below)
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._turns: deque[int] = deque()
        # Lanes that get a step before any more of a prompt, and the tokens of prompts issued since
        # lanes were last owed one.
        self._owed: set[int] = set()
        self._unpaid = 0
        self._on_their_way = 0
        self._commands: Commands = []
        self._next_lane = 0

    @property
    def waiting_count(self) -> int:
        """Sequences that have not begun, or were set back for want of memory."""
        return len(self._waiting)

    @property
    def running(self) -> list[Sequence]:
        """Sequences whose caches are held."""
        in_lanes = [s for lane in self._lanes.values() for s in lane.sequences]
        return [*self._prefilling, *in_lanes]

    @property
    def lane_sizes(self) -> list[int]:
        """Sequences by lane."""
        return [len(lane.sequences) for lane in self._lanes.values()]

    @property
    def is_idle(self) -> bool:
        """True while no sequence waits or runs, and nothing is on its way."""
        return not (self._waiting or self._prefilling or self._lanes or self._on_their_way)

    def cached_tokens(self) -> tuple[list[int], list[int]]:
        """Return the lengths room is taken for: of running sequences, and of kept ones."""
        return self._reserved(), [len(prefix.tokens) for prefix in self._prefixes]

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence out, wherever it is; with `keep`, keep its caches for others."""
        sequence.ended = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self._commands.append([Command.CLOSE, sequence.sequence_id])
        elif sequence.in_lane is not None:
            lane = self._lanes[sequence.in_lane]
            entry: int | None = None
            dropped: list[int] = []
            held = sequence.tokens[: sequence.computed]
            # While a token that is not known yet is being computed, no one could ask for it.
            if keep and len(held) == sequence.computed:
                entry, dropped = self._prefixes.keep(held, sequence.exact_count)
            self._commands.append([Command.LEAVE, sequence.sequence_id, lane.lane_id, entry or 0])
            self._commands += [[Command.DROP, old] for old in dropped]
            self._take_out(sequence, lane)

    def next_step(self) -> Step | None:
        """Return the next step to issue now; None: none before something changes."""
        self._admit()
        if self._on_their_way < self._window:
            self._join()
            self._rebalance()
            step = self._next_prefill() or self._next_decode()
            if step is not None:
                self._on_their_way += 1
                return step
        if self._commands and self._on_their_way == 0:
            return Tidy(self._flush())
        return None

    def done(self, step: Step, chosen: list[int]) -> list[tuple[Sequence, int, int]]:
        """Note that an issued step came back; return (sequence, its place, its token)."""
        self._on_their_way -= 1
        if not isinstance(step, Decode):
            return []
        if (lane := self._lanes.get(step.lane_id)) is not None:
            lane.on_their_way -= 1
        came = []
        issued = zip(step.sequences, step.attempts, chosen, strict=True)
        for place, (sequence, attempt, token) in enumerate(issued):
            # One that was set back meanwhile computes this token anew.
            if not sequence.ended and sequence.attempt == attempt:
                sequence.tokens.append(token)
                came.append((sequence, place, token))
        return came

    def _flush(self) -> Commands:
        commands, self._commands = self._commands, []
        return commands

    # Who runs.

    def _admit(self) -> None:
        for sequence in list(self._waiting):
            if len(self._prefilling) >= MAX_PREFILLING or len(self.running) >= MAX_RUNNING:
                return
            if self._is_served_by_another(sequence):
                continue
            sequence.reserved = min(
                sequence.limit, round_up(len(sequence.tokens) + 1) + _GROWTH_TOKENS
            )
            if not self._room.fits([*self._reserved(), sequence.reserved]):
                return
            # What it re-uses counts as used now, and is the last to be given up for it.
            self._find(sequence)
            self._make_room([sequence.reserved])
            self._waiting.remove(sequence)
            self._open(sequence)

    def _is_served_by_another(self, sequence: Sequence) -> bool:
        """Say whether a prompt being computed begins so alike that waiting for it pays."""
        if sequence.waits_for is None and not sequence.started:
            for other in self._prefilling:
                shared = common_length(other.tokens, sequence.tokens)
                # What will be kept of it: all but its last token.
                kept = len(other.tokens) - 1
                if shared < kept and not self._prefixes.is_trimmable(kept):
                    continue
                if sequence.exact:
                    shared = shared // self._chunk * self._chunk
                if shared >= max(MIN_TOKENS, len(sequence.tokens) // 2):
                    sequence.waits_for = other
                    break
        return sequence.waits_for in self._prefilling

    def _find(self, sequence: Sequence) -> Found | None:
        if not sequence.exact:
            return self._prefixes.find(sequence.tokens)
        return self._prefixes.find(sequence.tokens[: sequence.prompt_count], self._chunk)

    def _open(self, sequence: Sequence) -> None:
        found = self._find(sequence)
        sequence.computed = sequence.exact_count = 0
        entry = 0
        if found is not None:
            entry, sequence.computed = found.entry, found.length
            sequence.exact_count = found.exact_count
        if not sequence.started:
            sequence.reused = sequence.computed
        sequence.waits_for, sequence.started = None, True
        self._commands.append([Command.OPEN, sequence.sequence_id, entry, sequence.computed])
        self._prefilling.append(sequence)

    def _reserved(self, moved: Sequence | None = None, to: _Lane | None = None) -> list[int]:
        """Return the lengths that running sequences take: in a lane all as long as the longest.

        With `moved`, as if that one were in the lane `to`.
        """
        lengths = [s.reserved for s in self._prefilling if s is not moved]
        for lane in self._lanes.values():
            held = [s.reserved for s in lane.sequences if s is not moved]
            if moved is not None and lane is to:
                held.append(moved.reserved)
            lengths += [max(held, default=0)] * len(held)
        return lengths

    def _make_room(self, more: list[int]) -> bool:
        """Give up kept caches until all running ones fit, and `more` beside them.

        False, with nothing given up, where that would not do.
        """
        running = [*self._reserved(), *more]
        if not self._room.fits(running):
            return False
        while not self._room.fits([*running, *(len(prefix.tokens) for prefix in self._prefixes)]):
            if (dropped := self._prefixes.drop_oldest()) is not None:
                self._commands.append([Command.DROP, dropped])
        return True

    # Lanes.

    def _join(self) -> None:
        for sequence in [s for s in self._prefilling if s.prompt_left == 0]:
            self._keep_prompt(sequence)
            self._prefilling.remove(sequence)
            self._put_in(sequence, self._lane_for(sequence))
            self._commands.append([Command.JOIN, sequence.sequence_id, sequence.in_lane or 0])
            # A longer batch pads its shorter sequences, and the copy that was kept takes room too.
            self._make_room([])

    def _keep_prompt(self, sequence: Sequence) -> None:
        """Keep a copy of the prompt's caches, where there is room for one beside those running."""
        if not self._room.fits([*self._reserved(), sequence.computed]):
            return
        held = sequence.tokens[: sequence.computed]
        entry, dropped = self._prefixes.keep(held, sequence.exact_count)
        if entry is not None:
            self._commands.append([Command.KEEP, sequence.sequence_id, entry])
        self._commands += [[Command.DROP, old] for old in dropped]

    @property
    def _shared(self) -> list[_Lane]:
        """Lanes that sequences may join, the emptiest first."""
        lanes = [lane for lane in self._lanes.values() if lane.is_shared]
        return sorted(lanes, key=lambda lane: len(lane.sequences))

    def _lane_for(self, sequence: Sequence) -> _Lane:
        shared = self._shared
        if self._batched and not sequence.exact and len(shared) >= self._lane_count:
            for lane in shared:
                if self._room.fits(self._reserved(sequence, lane)):
                    return lane
        # Alone it takes what was set aside for it, and nothing for padding.
        return self._new_lane()

    def _new_lane(self) -> _Lane:
        self._next_lane += 1
        lane = self._lanes[self._next_lane] = _Lane(self._next_lane)
        self._turns.append(lane.lane_id)
        return lane

    def _rebalance(self) -> None:
        """Have shared lanes differ by one sequence at most, where there is room for the padding."""
        while self._batched:
            shared = self._shared
            # A sequence that is being computed stays where it is.
            movable = [lane for lane in shared if not lane.on_their_way and lane.sequences[1:]]
            if not movable:
                return
            fullest = movable[-1]
            sequence = fullest.sequences[-1]
            if len(shared) < self._lane_count:
                target = self._new_lane()
            else:
                target = shared[0]
                if len(fullest.sequences) - len(target.sequences) < 2:
                    return
                if not self._room.fits(self._reserved(sequence, target)):
                    return
            self._take_out(sequence, fullest)
            self._put_in(sequence, target)
            self._commands.append(
                [Command.MOVE, sequence.sequence_id, fullest.lane_id, target.lane_id]
            )
            self._make_room([])

    @staticmethod
    def _put_in(sequence: Sequence, lane: _Lane) -> None:
        sequence.in_lane, lane.changed = lane.lane_id, True
        lane.sequences.append(sequence)

    def _take_out(self, sequence: Sequence, lane: _Lane) -> None:
        sequence.in_lane, lane.changed = None, True
        lane.sequences.remove(sequence)
        if not lane.sequences:
            del self._lanes[lane.lane_id]
            self._turns.remove(lane.lane_id)
            self._owed.discard(lane.lane_id)

    # Turns.

    def _next_prefill(self) -> Prefill | None:
        if self._owed or not self._prefilling:
            return None
        sequence = next((s for s in self._prefilling if s.prompt_left > 0), None)
        if sequence is None:
            return None
        self._prefilling.remove(sequence)
        self._prefilling.append(sequence)
        start = sequence.computed
        on_grid = start == sequence.exact_count and start % self._chunk == 0
        end = min((start // self._chunk + 1) * self._chunk, len(sequence.tokens) - 1)
        if sequence.exact:
            # One that was set back: what it had generated, one by one as before.
            prompt = sequence.prompt_count - 1
            end = min(end, prompt) if start < prompt else start + 1
        sequence.computed = end
        if on_grid and end % self._chunk == 0:
            sequence.exact_count = end
        # Short prompts go together: a step of lanes that are about to grow is a dear one.
        self._unpaid += end - start
        if self._unpaid >= self._chunk:
            self._owed, self._unpaid = set(self._lanes), 0
        return Prefill(self._flush(), sequence, sequence.tokens[start:end])

    def _next_decode(self) -> Decode | None:
        for lane_id in list(self._turns):
            lane = self._lanes.get(lane_id)
            if lane is None or not self._is_ready(lane):
                continue
            if not self._grow(lane):
                return self._next_decode()  # a sequence was set back
            self._turns.remove(lane_id)
            self._turns.append(lane_id)
            self._owed.discard(lane_id)
            sequences = tuple(lane.sequences)
            tokens = None if lane.on_their_way else [s.tokens[s.computed] for s in sequences]
            for sequence in lane.sequences:
                sequence.computed += 1
            lane.on_their_way += 1
            lane.changed = False
            attempts = tuple(s.attempt for s in sequences)
            return Decode(self._flush(), lane_id, sequences, attempts, tokens)
        return None

    def _is_ready(self, lane: _Lane) -> bool:
        if lane.on_their_way == 0:
            return True
        return (
            self._ahead
            and lane.on_their_way == 1
            and not lane.changed
            # The token on its way may be the last there is room for.
            and all(s.computed + 1 < s.limit for s in lane.sequences)
        )

    def _grow(self, lane: _Lane) -> bool:
        """Have room for one more token of each sequence; False when one was set back for it."""
        for sequence in lane.sequences:
            if sequence.computed + 1 <= sequence.reserved:
                continue
            before = sequence.reserved
            sequence.reserved = min(sequence.limit, before + _GROWTH_TOKENS)
            if not self._make_room([]):
                sequence.reserved = before
                self._set_back()
                return False
        return True

    def _set_back(self) -> None:
        """Have the latest sequence begin anew later, so that the earliest always goes on."""
        latest = max(self.running, key=lambda s: s.sequence_id)
        if latest in self._prefilling:
            self._prefilling.remove(latest)
            self._commands.append([Command.CLOSE, latest.sequence_id])
        else:
            assert latest.in_lane is not None
            lane = self._lanes[latest.in_lane]
            self._commands.append([Command.LEAVE, latest.sequence_id, lane.lane_id, 0])
            self._take_out(latest, lane)
        latest.computed = latest.reserved = 0
        latest.attempt += 1
        earlier = sum(s.sequence_id < latest.sequence_id for s in self._waiting)
        self._waiting.insert(earlier, latest)
