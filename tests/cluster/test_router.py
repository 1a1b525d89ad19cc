import random
from collections import Counter

from warmstate.cluster.routing.router import MAX_LEAD, RouteHint, RoutingTable, rank_replicas


def first(hint: RouteHint, loads: dict[str, int], seed: int = 0) -> str:
    return rank_replicas(hint, loads, random.Random(seed))[0]


def test_the_longest_usable_prefix_wins_over_load() -> None:
    assert first(RouteHint(depths={"a": 64, "b": 640}), {"a": 0, "b": 3, "c": 0}) == "b"


def test_a_prefix_in_the_store_is_as_good_as_a_local_one_so_load_decides() -> None:
    hint = RouteHint(depths={"a": 640}, store_depth=640)
    assert first(hint, {"a": 2, "b": 1}) == "b"
    assert first(hint, {"a": 1, "b": 1}) == "a"


def test_ties_are_broken_at_random_among_the_least_busy() -> None:
    firsts = Counter(first(RouteHint(), {"a": 1, "b": 0, "c": 0}, seed) for seed in range(200))
    assert set(firsts) == {"b", "c"}
    assert min(firsts.values()) > 50


def test_a_prefix_does_not_draw_everyone_to_one_busy_replica() -> None:
    hint = RouteHint(depths={"a": 640})
    assert first(hint, {"a": MAX_LEAD - 1, "b": 0}) == "a"
    assert first(hint, {"a": MAX_LEAD, "b": 0}) == "b"


def test_a_replica_that_refused_comes_last_but_stays() -> None:
    hint = RouteHint(depths={"a": 640}, avoided=frozenset({"a"}))
    assert rank_replicas(hint, {"a": 0, "b": 9}, random.Random(0)) == ["b", "a"]


def test_a_pin_leaves_no_choice() -> None:
    assert rank_replicas(RouteHint(depths={"a": 640}, pinned="b"), {"a": 0, "b": 9}, random.Random(0)) == ["b"]


def test_an_unknown_pin_goes_to_someone_who_can_say_so() -> None:
    assert len(rank_replicas(RouteHint(pinned="gone"), {"a": 0, "b": 0}, random.Random(0))) == 2


def test_every_replica_is_ranked_once() -> None:
    loads = dict.fromkeys("abcdef", 0)
    assert sorted(rank_replicas(RouteHint(depths={"c": 64}), loads, random.Random(1))) == list("abcdef")
    assert rank_replicas(RouteHint(), {}, random.Random(1)) == []


def test_the_table_counts_requests_and_forgets_dead_replicas() -> None:
    table = RoutingTable()
    table.set_replicas(["a", "b"])
    table.start_request("a")
    table.start_request("a")
    table.end_request("a")
    table.start_request("unheard of")
    table.set_replicas(["a", "c"])
    assert dict(table.loads) == {"a": 1, "c": 0}
    table.drop_replica("a")
    table.end_request("a")
    assert dict(table.loads) == {"c": 0}
