"""When a tier goes down, and how it comes back."""

import pytest

from kvfs.health import Health, HealthLimits, HealthState

LIMITS = HealthLimits(
    half_life_s=10.0, failures_max=3.0, failed_share_max=0.3, pause_s_min=1.0, pause_s_max=8.0
)
S = 1_000_000_000


def down_at(now_ns: int) -> Health:
    health = Health(LIMITS)
    for _ in range(3):
        health.note_failed(now_ns)
    assert health.state(now_ns) is HealthState.DOWN
    return health


def test_it_begins_up_and_takes_any_number() -> None:
    health = Health(LIMITS)
    assert health.state(0) is HealthState.UP
    assert health.retry_ns is None
    assert all(health.take(0) for _ in range(10))


def test_failures_in_a_row_bring_it_down_for_a_pause() -> None:
    health = Health(LIMITS)
    health.note_failed(S)
    health.note_failed(S)
    assert health.may_take(S)
    health.note_failed(S)
    assert health.retry_ns == 2 * S
    assert not health.take(2 * S - 1)
    assert health.state(2 * S) is HealthState.ON_TRIAL


def test_few_failures_among_many_reads_do_not() -> None:
    health = Health(LIMITS)
    for n in range(1000):
        now_ns = n * S // 100
        if n % 10 == 0:
            health.note_failed(now_ns)
        else:
            health.note_landed(now_ns)
    assert health.state(10 * S) is HealthState.UP
    assert health.failures > LIMITS.failures_max


def test_every_second_failure_does() -> None:
    health = Health(LIMITS)
    for n in range(6):
        assert health.state(n) is HealthState.UP
        health.note_landed(n)
        health.note_failed(n)
        if health.retry_ns is not None:
            break
    assert health.state(n) is HealthState.DOWN
    assert n == 2  # the third


def test_what_is_long_past_does_not_count() -> None:
    health = Health(LIMITS)
    for n in range(20):  # half of all, but a minute apart
        health.note_failed(n * 60 * S)
        health.note_landed(n * 60 * S)
    assert health.state(20 * 60 * S) is HealthState.UP
    assert health.failures < 1.1


def test_a_trial_is_one_read_and_brings_it_up() -> None:
    health = down_at(0)
    assert health.take(S)
    assert not health.take(S)
    health.note_landed(S)
    assert health.state(S) is HealthState.UP
    assert health.take(S) and health.take(S)
    health.note_failed(S)
    assert health.state(S) is HealthState.UP  # older failures are forgiven


@pytest.mark.parametrize("is_stall", [True, False])
def test_a_trial_that_goes_wrong_doubles_the_pause_up_to_the_limit(is_stall: bool) -> None:
    health = down_at(0)
    pauses_s = []
    for _ in range(5):
        retry_ns = health.retry_ns
        assert retry_ns is not None
        assert health.take(retry_ns)
        if is_stall:
            health.note_stalled(retry_ns, retry_ns)
        else:
            health.note_failed(retry_ns)
        after_ns = health.retry_ns
        assert after_ns is not None
        pauses_s.append((after_ns - retry_ns) / S)
    assert pauses_s == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_pauses_are_short_again_after_a_long_time() -> None:
    health = down_at(0)
    assert health.take(S)
    health.note_landed(S)
    later_ns = 1000 * S
    for _ in range(3):
        health.note_failed(later_ns)
    assert health.retry_ns == pytest.approx(later_ns + S, abs=S // 100)


def test_pauses_are_longer_where_it_goes_down_again_soon() -> None:
    health = down_at(0)
    assert health.take(S)
    health.note_landed(S)
    for _ in range(3):
        health.note_failed(2 * S)
    retry_ns = health.retry_ns
    assert retry_ns is not None
    assert 1.8 * S < retry_ns - 2 * S < 2 * S


def test_a_trial_that_was_cancelled_leaves_it_to_the_next() -> None:
    health = down_at(0)
    assert health.take(S)
    health.note_nothing()
    assert health.state(S) is HealthState.ON_TRIAL
    assert health.take(S)


def test_one_stall_and_silence_bring_it_down() -> None:
    health = Health(LIMITS)
    for n in range(1000):
        health.note_landed(n)
    health.note_stalled(S, 2 * S)  # nothing has landed since it began
    assert health.state(2 * S) is HealthState.DOWN


def test_a_stall_while_others_land_is_a_failure_among_many() -> None:
    health = Health(LIMITS)
    for n in range(100):
        health.note_landed(S + n)
    health.note_stalled(S, 2 * S)
    assert health.state(2 * S) is HealthState.UP
    assert health.failures == pytest.approx(1.0)


def test_what_lands_late_of_a_silent_tier_puts_it_on_trial_at_once() -> None:
    health = Health(LIMITS)
    health.note_stalled(0, S)
    assert not health.may_take(S)
    health.note_landed(S + 1)
    assert health.state(S + 1) is HealthState.ON_TRIAL


def test_what_lands_late_of_a_failing_tier_does_not_shorten_its_pause() -> None:
    health = down_at(0)
    health.note_landed(1)
    assert health.state(1) is HealthState.DOWN
    health.note_failed(2)  # nor does what fails late lengthen it
    assert health.retry_ns == S
