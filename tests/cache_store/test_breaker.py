"""The circuit breaker on a clock of its own."""

from warmstate.cache_store.breaker import Breaker


def test_it_opens_after_three_failures_in_a_row_only() -> None:
    breaker = Breaker(3, 5.0, clock=lambda: 0.0)
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    assert breaker.times_opened == 1


def test_an_open_breaker_lets_one_trial_pass_per_period() -> None:
    now = [0.0]
    breaker = Breaker(1, 5.0, clock=lambda: now[0])
    breaker.failed()
    now[0] = 4.9
    assert not breaker.allows()
    now[0] = 5.0
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.failed()
    now[0] = 10.1
    assert breaker.allows()
    breaker.succeeded()
    assert [breaker.allows(), breaker.allows()] == [True, True]
    assert breaker.times_opened == 1


def test_a_trial_that_never_reports_does_not_close_the_door_for_ever() -> None:
    now = [0.0]
    breaker = Breaker(1, 5.0, clock=lambda: now[0])
    breaker.failed()
    for period in range(1, 4):
        now[0] = 5.0 * period
        assert breaker.allows()
