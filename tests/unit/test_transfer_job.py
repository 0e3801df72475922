"""A job's gate: what is handed over, and what is not any more."""

from kvfs.schedule import Outcome
from kvfs.transfer.job import Job, Landed, Task
from kvfs.transfer.memory import Memory
from kvfs.transfer.words import Ending, JobEnd, WantedChunk

CHUNKS = tuple(WantedChunk(bytes([n] * 16), 4, (0, 1)) for n in range(4))


def landed(chunk: int) -> Landed:
    def unused(_: Memory) -> None:
        raise AssertionError("memory of the caller's is not given back")

    return Landed(chunk, memoryview(bytearray(4)), None, unused, is_in_place=True)


def test_nothing_is_handed_over_when_it_is_shut() -> None:
    got: list[int] = []
    job = Job(1, CHUNKS, lambda chunk: got.append(chunk.chunk), None, lambda job: job.shut())
    assert job.hand_over(landed(2))
    job.cancel()
    assert not job.hand_over(landed(3))
    assert got == [2]


def test_what_was_not_handed_over_is_lost_and_why() -> None:
    ends: list[JobEnd] = []
    job = Job(1, CHUNKS, Landed.give_back, ends.append, lambda job: None)
    task = Task(job, 0.0, is_in_place=True)
    task.note_trouble(0, Outcome.CORRUPT, 0)
    task.note_trouble(0, Outcome.FAILED, 1)  # the worse one counts
    task.note_trouble(1, Outcome.MISSING, 0)
    task.note_trouble(1, Outcome.MISSING, 1)
    task.note_trouble(2, Outcome.MISSING, 0)
    for chunk in range(3):
        task.note_lost(chunk, {0, 1, 2})
    job.hand_over(landed(3))
    assert job.end is None and not job.is_quiet
    job.tell_end(Ending.DONE, task.troubles)
    why = {0: Outcome.CORRUPT, 1: Outcome.MISSING, 2: Outcome.FAILED}
    assert job.end == JobEnd(Ending.DONE, (0, 1, 2), why) == ends[0]
    assert job.wait(0.0) == job.end


def test_a_tier_that_is_not_there_does_not_count_as_down() -> None:
    task = Task(Job(1, CHUNKS, Landed.give_back, None, lambda job: None), 0.0, is_in_place=True)
    task.note_lost(0, {7})
    assert task.troubles == {0: Outcome.MISSING}
