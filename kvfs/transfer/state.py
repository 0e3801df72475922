"""What a transfer knows, and what its threads are to do next: the schedule, and the memory of what
it decides.

No threads and no clock in it, and no calls of anybody's: used under the transfer's lock, it answers
with what is to be done without the lock.
"""

from collections import deque
from heapq import heappop, heappush
from typing import assert_never

from kvfs.errors import QueueFull, Unavailable
from kvfs.schedule import (
    Action,
    CancelRead,
    CheckChunk,
    Chunk,
    ChunkChecked,
    ChunkDone,
    ChunkLost,
    Event,
    JobAdded,
    JobCancelled,
    JobEnded,
    KeepRead,
    Outcome,
    ReadEnded,
    Schedule,
    StartRead,
    Tick,
)
from kvfs.schedule import Memory as Into
from kvfs.tiers.contract import Tier
from kvfs.transfer.job import Task
from kvfs.transfer.memory import Memory, Part, Place, Role
from kvfs.transfer.reads import Check, Read
from kvfs.transfer.supply import Balance, PlainSupply, PoolSupply
from kvfs.transfer.todo import Gone, Handover, Over, Tally, Todo, Wrong
from kvfs.transfer.words import Ending, Slot, WantedChunk


class State:
    """All that a transfer knows. `tell` and its like leave what is to be done in `todo`."""

    def __init__(self, supply: PlainSupply | PoolSupply) -> None:
        self.supply = supply
        self.schedule = Schedule(scratch=0)
        self.tiers: dict[int, Tier] = {}
        self.tasks: dict[int, Task] = {}  # until they are over
        self.reads: dict[int, Read] = {}  # under way
        self.tally = Tally()
        self.is_closed = False  # no job may begin
        self._untold = 0  # jobs that have begun and do not know that they are over
        self.bare = 0  # chunks that have no slot of the pool yet
        self._todo = Todo()
        self._events: deque[Event] = deque()
        self._deadlines: list[tuple[int, int]] = []  # of jobs, a heap: when, and which

    def take_todo(self) -> Todo:
        """What is to be done, once."""
        todo, self._todo = self._todo, Todo()
        if isinstance(self.supply, PoolSupply):
            todo.is_unbalanced = self.supply.is_unbalanced(self.bare, is_reading=bool(self.tasks))
        return todo

    @property
    def wake_ns(self) -> int | None:
        """When `wake` is due, if nothing happens before."""
        while self._deadlines and self._deadlines[0][1] not in self.tasks:
            heappop(self._deadlines)
        wake_ns = self.schedule.wake_ns
        if not self._deadlines:
            return wake_ns
        return self._deadlines[0][0] if wake_ns is None else min(wake_ns, self._deadlines[0][0])

    def is_at_rest(self) -> bool:
        """Whether all jobs know that they are over, and no tier is reading."""
        return not self._untold and not self.reads

    # What happens ---------------------------------------------------------------------------------
    def tell(self, event: Event, now_ns: int) -> None:
        """The schedule hears of something, and of all that this frees. Raises `QueueFull`."""
        self._obey(self.schedule.handle(event, now_ns))
        self._drain(now_ns)

    def wake(self, now_ns: int) -> None:
        """Time has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            task = self.tasks.get(heappop(self._deadlines)[1])
            if task is not None:
                self.cancel(task, Ending.LATE, now_ns)
        self.tell(Tick(), now_ns)

    def add(self, task: Task, priority: int, now_ns: int) -> None:
        """A job begins. Raises `QueueFull`, and `Unavailable` when there are to be none any more:
        nothing has changed then."""
        if self.is_closed:
            raise Unavailable("this transfer is closed; nothing is read any more")
        job = task.job
        chunks = tuple(Chunk(chunk.size_bytes, chunk.tiers) for chunk in job.chunks)
        is_pooled = isinstance(self.supply, PoolSupply)
        task.bare = len(chunks) if is_pooled else 0
        self.tasks[job.number] = task
        self.bare += task.bare
        try:
            self.tell(JobAdded(job.number, chunks, priority, is_pooled), now_ns)
        except QueueFull:
            self.bare -= task.bare
            del self.tasks[job.number]
            raise
        self._untold += 1
        heappush(self._deadlines, (round(task.end_s * 1e9), job.number))
        self._note(self.supply.begin(task.largest_bytes))
        self._drain(now_ns)

    def cancel(self, task: Task, ending: Ending, now_ns: int) -> None:
        """Nobody wants a job any more. One that is over, or about to be, is left alone."""
        if task.ending is not Ending.DONE or task.job.number not in self.tasks:
            return
        task.ending = ending
        task.job.shut()
        if not task.is_read:
            task.is_read = True
            self._obey(self.schedule.handle(JobCancelled(task.job.number), now_ns))
            for place in task.places.values():
                self._let_go(place)
            task.places.clear()
            self.bare -= task.bare
            task.bare = 0
        for place in task.waiting.values():
            self._let_go(place)
            task.handing -= 1
        task.waiting.clear()
        self._end_if_over(task)
        self._drain(now_ns)

    def end_read(self, read: Read, outcome: Outcome, now_ns: int) -> None:
        """A tier's call has ended."""
        task, memory = read.task, read.memory
        memory.writers -= 1
        if memory.role is Role.OWN:
            self._stop_writing(task)
            if memory.writers == 0 and read.chunk in task.waiting:
                self._hand_over_from(task, read.chunk, task.waiting.pop(read.chunk))
        digest = task.job.chunks[read.chunk].digest
        if outcome is not Outcome.LANDED:
            task.note_trouble(read.chunk, outcome, read.tier_number)
        if outcome is Outcome.CORRUPT:
            self._todo.work.append(Wrong(read.tier_number, read.tier, digest))
        elif outcome is Outcome.MISSING:
            self._todo.work.append(Gone(read.tier_number, digest))
        self._obey(self.schedule.handle(ReadEnded(read.number, outcome), now_ns))
        del self.reads[read.number]  # not before: it may be kept
        self._drop(memory)
        self._drain(now_ns)

    def end_check(self, check: Check, outcome: Outcome, now_ns: int) -> None:
        """A chunk that was read in parts has been looked at."""
        task, chunk = check.task, check.chunk
        for part in check.parts:
            self._drop(part.memory)
        place = task.places.get(chunk)
        if place is not None:
            if outcome is Outcome.CORRUPT:
                self._forget_parts(task, chunk, place)
            checked = ChunkChecked(task.job.number, chunk, outcome)
            self._obey(self.schedule.handle(checked, now_ns))
        self._drain(now_ns)

    def end_copy(self, handover: Handover, now_ns: int) -> None:
        """What was to be copied is where it is wanted."""
        for part in handover.copies:
            self.tally.copied_bytes += part.end - part.begin
            self._drop(part.memory)
        if handover.target.role is Role.OWN:
            self._stop_writing(handover.task)
        self._drain(now_ns)

    def end_handover(self, handover: Handover, now_ns: int, *, is_given: bool) -> None:
        """A chunk's callback has returned; or nobody wanted it, and its memory is let go."""
        task = handover.task
        if is_given:
            self.tally.landed_chunks += 1
            self.tally.landed_bytes += task.job.chunks[handover.chunk].size_bytes
        if not is_given or handover.target.role is Role.OWN:
            self._drop(handover.target)
        task.handing -= 1
        self._end_if_over(task)
        self._drain(now_ns)

    def end_task(self, task: Task) -> None:
        """A job's end has been told."""
        task.is_told = True
        self._untold -= 1
        if not task.writing:
            self._todo.quiet.append(task)

    def give_back(self, memory: Memory, now_ns: int) -> None:
        """Who got a chunk does not use its memory any more."""
        self._drop(memory)
        self._drain(now_ns)

    # The pool -------------------------------------------------------------------------------------
    def balance(self, now_ns: int) -> Balance:
        """What is to be done with the pool now."""
        assert isinstance(self.supply, PoolSupply)
        balance, event = self.supply.balance(self.bare, is_reading=bool(self.tasks))
        if event is not None:
            self.tell(event, now_ns)
        return balance

    def stock(self, slots: list[Slot], now_ns: int) -> None:
        """Slots were taken from the pool."""
        assert isinstance(self.supply, PoolSupply)
        self.tell(self.supply.stock(slots), now_ns)

    # What the schedule decides --------------------------------------------------------------------
    def _drain(self, now_ns: int) -> None:
        while self._events:
            self._obey(self.schedule.handle(self._events.popleft(), now_ns))

    def _obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartRead():
                    self._start_read(action)
                case KeepRead():
                    self._keep(self.reads[action.read])
                case ChunkDone():
                    self._hand_over(self.tasks[action.job], action.chunk)
                case CancelRead():
                    read = self.reads[action.read]
                    read.is_cancelled = True
                    self._strand(read.memory)
                case CheckChunk():
                    self._check(self.tasks[action.job], action.chunk)
                case ChunkLost():
                    self._lose(self.tasks[action.job], action.chunk)
                case JobEnded():
                    task = self.tasks[action.job]
                    task.is_read = True
                    self._end_if_over(task)
                case _:
                    assert_never(action)

    def _start_read(self, action: StartRead) -> None:
        task = self.tasks[action.job]
        chunk = task.job.chunks[action.chunk]
        place = task.places.get(action.chunk)
        if place is None:
            place = task.places[action.chunk] = Place(self._new_home(task, chunk))
        memory = place.home
        if action.into is Into.SCRATCH:
            memory = self.supply.take_scratch(chunk.size_bytes)
        memory.users += 1
        memory.writers += 1
        if memory.role is Role.OWN:
            task.writing += 1
        tier = self.tiers[action.tier]
        read = Read(action, tier, task, memory)
        self.reads[read.number] = read
        self._todo.reads.append(read)

    def _new_home(self, task: Task, chunk: WantedChunk) -> Memory:
        if chunk.memory is not None:
            home = Memory(Role.OWN, chunk.memory)
        else:
            assert isinstance(self.supply, PoolSupply)
            home = self.supply.take_buffer()
            task.bare -= 1
            self.bare -= 1
        home.users += 1
        return home

    def _keep(self, read: Read) -> None:
        """The bytes of a read are those of its chunk."""
        place = read.task.places[read.chunk]
        place.parts.append(Part(read.begin, read.end, read.memory, read.tier_number, read.tier))
        read.memory.users += 1

    def _check(self, task: Task, chunk: int) -> None:
        parts = sorted(task.places[chunk].parts, key=lambda part: part.begin)
        for part in parts:
            part.memory.users += 1
        self._todo.work.append(Check(task, chunk, tuple(parts)))

    def _hand_over(self, task: Task, chunk: int) -> None:
        place = task.places.pop(chunk)
        task.handing += 1
        is_late = place.target() is not place.home and place.home.role is Role.OWN
        if is_late and task.is_in_place:
            task.waiting[chunk] = place  # for the last call that may write there
        else:
            self._hand_over_from(task, chunk, place)

    def _hand_over_from(self, task: Task, chunk: int, place: Place) -> None:
        target = place.target()
        copies = tuple(part for part in place.parts if part.memory is not target)
        for memory in (target, *(part.memory for part in copies)):
            memory.users += 1
        if target.role is Role.SCRATCH and place.home.role is Role.BUFFER:
            target.role, place.home.role = Role.BUFFER, Role.SCRATCH  # slots are all alike
            self._strand(place.home)
        if copies and target.role is Role.OWN:
            task.writing += 1  # the copying
        self._let_go(place)
        self._todo.work.append(Handover(task, chunk, target, copies))

    def _lose(self, task: Task, chunk: int) -> None:
        self.tally.lost_chunks += 1
        task.note_lost(chunk, self.tiers.keys())
        place = task.places.pop(chunk, None)
        if place is not None:
            self._let_go(place)
        elif task.bare:
            task.bare -= 1
            self.bare -= 1

    def _forget_parts(self, task: Task, chunk: int, place: Place) -> None:
        """Together they are wrong; which of them nobody knows."""
        digest = task.job.chunks[chunk].digest
        for number, tier in {part.tier_number: part.tier for part in place.parts}.items():
            task.note_trouble(chunk, Outcome.CORRUPT, number)
            self._todo.work.append(Wrong(number, tier, digest))
        for part in place.parts:
            self._drop(part.memory)
        place.parts.clear()

    # Ends -----------------------------------------------------------------------------------------
    def _end_if_over(self, task: Task) -> None:
        if task.is_read and not task.handing and task.job.number in self.tasks:
            del self.tasks[task.job.number]
            self._todo.work.append(Over(task))
            self._note(self.supply.end(task.largest_bytes))

    def _stop_writing(self, task: Task) -> None:
        task.writing -= 1
        if task.is_told and not task.writing:
            self._todo.quiet.append(task)

    def _let_go(self, place: Place) -> None:
        home = place.home
        if home.role is Role.BUFFER and home.writers:  # only calls have it that nobody can end
            assert isinstance(self.supply, PoolSupply)
            self.supply.abandon(home)
        for memory in place.memories():
            self._drop(memory)

    def _drop(self, memory: Memory) -> None:
        """One user less."""
        memory.users -= 1
        if memory.users == 0:
            self._note(self.supply.free(memory))

    def _strand(self, memory: Memory) -> None:
        """Of what may write to it nothing is wanted any more. There must be other scratch then: the
        call may never end."""
        if memory.role is Role.SCRATCH and memory.writers and not memory.is_stranded:
            self._note(self.supply.strand(memory))

    def _note(self, event: Event | None) -> None:
        """The schedule is to be told when it has been obeyed."""
        if event is not None:
            self._events.append(event)
