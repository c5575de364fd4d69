"""The router's choice, from what replicas publish."""

import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from twolane.engine.kv.page_hash import page_hashes
from twolane.engine.kv.prefix_digest import Landmarks, PrefixBook, is_landmark
from twolane.engine.prompt_work import UNKNOWN, PromptPace, PromptWork, WaitingPrompt
from twolane.router import choose as chooses
from twolane.router import table as table_module
from twolane.router.choose import FAIR_TURNS, Chosen, NoReplica, choose
from twolane.router.policies import POLICIES, RayPrefixAware
from twolane.router.state import FORMAT, ReplicaState, RoutedRequest
from twolane.router.table import Replica, ReplicaView, Table
from twolane.slo import Slo

PAGE = 16
TOKEN_SECONDS = 1e-4
SLO = Slo(ttft=1.0)


def state(queued: int = 0, prompt=(), **more) -> ReplicaState:
    book = PrefixBook(PAGE)
    book.change(
        {
            hashed: pages
            for pages, hashed in enumerate(page_hashes(prompt, PAGE), 1)
            if is_landmark(pages, PAGE)
        }
    )
    kept = {"slo": SLO, "prompt_pace": PromptPace(token=TOKEN_SECONDS), **more}
    return ReplicaState(
        queued=PromptWork(1, queued, 0),
        page_size=PAGE,
        pages=10_000,
        **{"pages_free": 10_000, **kept},
        digest=book.digest(),
    )


def table(**states: ReplicaState) -> Table:
    made = Table()
    for name, each in states.items():
        made.publish(name, each, 0.0)
    return made


def ask(prompt=range(1000, 3000), session=None, ttft=None) -> RoutedRequest:
    return RoutedRequest(len(prompt), 16, Landmarks.of(prompt, PAGE), ttft, session)


def sent_to(made: Table, asked: RoutedRequest, now: float = 0.0) -> str:
    """Choose, and send there."""
    choice = choose(asked, made.views(asked, now))
    assert isinstance(choice, Chosen), choice
    made.sent(choice.name, asked, now)
    return choice.name


def test_the_shortest_queue_gets_a_prompt_that_is_new_everywhere() -> None:
    assert sent_to(table(a=state(5000), b=state(1000), c=state(3000)), ask()) == "b"


def test_a_prefix_is_worth_a_queue_while_it_saves_more() -> None:
    asked = ask()
    warm = table(a=state(1500, range(1000, 3000)), b=state())
    choice = choose(asked, warm.views(asked, 0.0))
    assert isinstance(choice, Chosen)
    assert choice.name == "a"
    assert choice.reused > 1500
    crowded = table(a=state(9000, range(1000, 3000)), b=state())
    assert sent_to(crowded, asked) == "b"


def test_first_tokens_later_than_predicted_are_counted_on() -> None:
    made = table(a=state(5000))
    assert isinstance(choose(ask(), made.views(ask(), 0.0)), Chosen)
    for turn in range(5):
        sent = made.sent("a", ask(), 10.0 * turn, predicted=0.7)
        made.began("a", sent, 10.0 * turn + 2.0)
        made.ended("a", sent)
    assert isinstance(choose(ask(), made.views(ask(), 0.0)), NoReplica)


def test_a_replica_where_nothing_waits_is_never_refused() -> None:
    asked = ask(ttft=1e-3)
    idle = ReplicaState(slo=SLO, prompt_pace=PromptPace(token=TOKEN_SECONDS), pages=9, pages_free=9)
    made = Table()
    made.publish("a", idle, 0.0)
    assert isinstance(choose(asked, made.views(asked, 0.0)), Chosen)


def test_no_request_is_refused_where_that_is_off() -> None:
    made = Table(refuse_late=False)
    made.publish("a", state(500_000), 0.0)
    assert isinstance(choose(ask(), made.views(ask(), 0.0)), Chosen)


def test_the_prediction_is_queue_and_new_tokens_at_the_replicas_speed() -> None:
    asked = ask()
    choice = choose(asked, table(a=state(3000)).views(asked, 0.0))
    assert isinstance(choice, Chosen)
    assert choice.ttft == pytest.approx((3000 + 2000) * TOKEN_SECONDS)


def test_what_was_sent_counts_until_the_replica_has_told_of_it() -> None:
    made = table(a=state(), b=state())
    first = [ask(range(i * 5000, i * 5000 + 2000)) for i in range(4)]
    names = [sent_to(made, each) for each in first]
    assert sorted(names) == ["a", "a", "b", "b"]
    made.publish("a", state(), 1.0)
    made.publish("b", state(8000), 1.0)
    assert sent_to(made, ask(range(90_000, 92_000)), 1.0) == "a"


def test_what_has_ended_does_not_count_although_the_replica_has_not_told_of_it() -> None:
    made, asked = table(a=state()), ask()
    sent = made.sent("a", asked, 0.0)
    assert made.views(asked, 0.0)[0].wait == pytest.approx(2000 * TOKEN_SECONDS)
    made.ended("a", sent)
    assert made.views(asked, 0.0)[0].wait == 0.0


def test_a_prefix_that_is_on_its_way_is_found() -> None:
    made = table(a=state(), b=state())
    assert sent_to(made, ask()) == sent_to(made, ask())


def test_nobody_is_sent_what_comes_too_late_and_the_client_is_told_when() -> None:
    asked, queue = ask(), round((3 + SLO.ttft) / TOKEN_SECONDS)
    refused = choose(asked, table(a=state(queue), b=state(2 * queue)).views(asked, 0.0))
    assert isinstance(refused, NoReplica)
    assert refused.retry_after == 4  # three seconds of queue, and 0.2 of its own
    barely = round(0.99 * SLO.ttft / TOKEN_SECONDS) - 2000
    assert sent_to(table(a=state(barely)), asked) == "a"


def waiting(*prompts: tuple[int, float], begun: int = 0) -> ReplicaState:
    """What a replica tells whose prompts of so many tokens are due in so many seconds."""
    told = [WaitingPrompt(new, 0, left) for new, left in prompts]
    queued = begun + sum(new for new, _ in prompts)
    return state(queued, yielding=told)


def test_a_short_prompt_waits_for_those_alone_that_are_kept_before_it() -> None:
    """Of 14,000 tokens within a second, 10,000 can be done: the longest prompt is given up."""
    asked = ask()
    given_up = table(a=waiting((7000, 0.9), (4000, 0.95), (3000, 0.95)))
    [view] = given_up.views(asked, 0.0)
    assert view.wait == pytest.approx(7000 * TOKEN_SECONDS)
    assert view.longest == pytest.approx(4000 * TOKEN_SECONDS)
    in_order = table(a=state(14_000))
    assert in_order.views(asked, 0.0)[0].wait == pytest.approx(14_000 * TOKEN_SECONDS)
    assert sent_to(given_up, asked) == "a"
    assert isinstance(choose(asked, in_order.views(asked, 0.0)), NoReplica)


def test_what_a_replica_has_begun_is_not_given_up() -> None:
    asked = ask()
    [view] = table(a=waiting((4000, 0.95), begun=5000)).views(asked, 0.0)
    assert view.wait == pytest.approx(9000 * TOKEN_SECONDS)
    assert isinstance(choose(asked, table(a=waiting(begun=9000)).views(asked, 0.0)), NoReplica)


def test_a_prompt_goes_where_no_other_is_given_up_for_it() -> None:
    asked = ask()
    assert sent_to(table(a=waiting((9000, 0.95)), b=state(7000)), asked) == "b"
    assert sent_to(table(a=waiting((9000, 0.95)), b=state(9000)), asked) == "a"
    longest = ask(range(100_000, 109_500))
    assert isinstance(
        choose(longest, table(a=waiting((9000, 0.95))).views(longest, 0.0)), NoReplica
    )


def test_prompts_that_were_sent_since_give_way_too() -> None:
    made = table(a=waiting())
    long, short = ask(range(100_000, 109_000)), ask()
    assert sent_to(made, long) == "a"
    assert made.views(short, 0.0)[0].longest == pytest.approx(9000 * TOKEN_SECONDS)
    assert sent_to(made, short) == "a"
    assert made.views(short, 0.0)[0].wait == pytest.approx(2000 * TOKEN_SECONDS)


def test_a_prompt_that_is_due_sooner_does_not_wait_for_later_ones() -> None:
    made = table(a=waiting((3000, 5.0), (1000, 0.2)))
    assert made.views(ask(ttft=0.5), 0.0)[0].wait == pytest.approx(1000 * TOKEN_SECONDS)
    assert made.views(ask(ttft=6.0), 0.0)[0].wait == pytest.approx(4000 * TOKEN_SECONDS)


def test_without_a_bound_or_a_speed_nobody_is_refused() -> None:
    queue = 10_000_000
    assert sent_to(table(a=state(queue, slo=Slo())), ask()) == "a"
    assert sent_to(table(a=state(queue, prompt_pace=UNKNOWN)), ask()) == "a"
    assert sent_to(table(a=state(queue)), ask(ttft=math.inf)) == "a"


def test_a_requests_own_bound_goes_before_the_replicas() -> None:
    asked = ask(ttft=0.05)
    assert isinstance(choose(asked, table(a=state()).views(asked, 0.0)), NoReplica)


def test_no_replica_starves_beside_one_that_has_the_prefix() -> None:
    made = table(a=state(prompt=range(1000, 3000)), b=state())
    names = []
    for turn in range(4 * 2 * FAIR_TURNS):
        made.publish("a", state(prompt=range(1000, 3000)), float(turn))
        made.publish("b", state(), float(turn))
        asked = RoutedRequest(2000, 16, Landmarks.of(range(1000, 3000), PAGE))
        made["b"].assumed.clear()  # as if it had been evicted
        names.append(sent_to(made, asked, float(turn)))
    assert names.count("a") > names.count("b") >= 2


def test_a_session_stays_while_that_is_not_dearer() -> None:
    made = table(a=state(), b=state())
    home = sent_to(made, ask(session="user"))
    other = "b" if home == "a" else "a"
    fresh = ask(range(50_000, 52_000), session="user")
    made.publish(home, state(100), 1.0)
    made.publish(other, state(), 1.0)
    assert sent_to(made, fresh, 1.0) == home
    made.publish(home, state(5000), 2.0)
    made.publish(other, state(), 2.0)
    assert sent_to(made, ask(range(70_000, 72_000), session="user"), 2.0) == other


def test_the_sessions_that_asked_last_are_remembered(monkeypatch) -> None:
    monkeypatch.setattr(table_module, "MAX_SESSIONS", 2)
    made = table(a=state(), b=state())
    for session in ("x", "y", "x", "z"):
        made.sent("a", ask(session=session), 0.0)
    homes = [made.views(ask(session=session), 0.0)[0].home for session in ("x", "y", "z")]
    assert homes == [True, False, True]


@pytest.mark.parametrize("change", [{"draining": True}, {"ready": False}, {"format": FORMAT + 1}])
def test_a_replica_that_takes_nothing_is_sent_nothing(change) -> None:
    asked = ask()
    assert choose(asked, table(a=state(**change)).views(asked, 0.0)) == NoReplica(
        1, "no replica is ready"
    )
    assert sent_to(table(a=state(**change), b=state(7000)), asked) == "b"


def test_every_replica_has_its_own_speed_or_else_the_usual_one() -> None:
    asked, slow = ask(), PromptPace(token=3 * TOKEN_SECONDS)
    for pace, expected in ((slow, 3 * TOKEN_SECONDS), (UNKNOWN, TOKEN_SECONDS)):
        made = table(a=state(1000, prompt_pace=pace), b=state(9000), c=state(9000))
        chosen = choose(asked, made.views(asked, 0.0))
        assert isinstance(chosen, Chosen)
        assert (chosen.name, chosen.ttft) == ("a", pytest.approx(3000 * expected))


def test_a_new_replica_was_not_passed_over_before_it_came() -> None:
    made = table(a=state())
    for turn in range(4 * FAIR_TURNS):
        made.ended("a", made.sent("a", ask(range(turn * 5000, turn * 5000 + 2000)), 0.0))
    made.publish("b", state(5000), 1.0)
    assert sent_to(made, ask(range(500_000, 502_000)), 1.0) == "a"


def test_full_memory_counts_as_waiting() -> None:
    asked = ask()
    choice = choose(asked, table(a=state(pages_free=10)).views(asked, 0.0))
    assert isinstance(choice, Chosen)
    freed = (2000 + 16) - 10 * PAGE  # tokens of others
    assert choice.ttft == pytest.approx((2000 + freed) * TOKEN_SECONDS)
    assert sent_to(table(a=state(pages_free=10), b=state(500)), ask()) == "b"


def test_without_any_speed_requests_spread() -> None:
    made = table(**{name: state(prompt_pace=UNKNOWN) for name in "abc"})
    asks = [ask(range(i * 5000, i * 5000 + 2000)) for i in range(3)]
    assert sorted(sent_to(made, each) for each in asks) == ["a", "b", "c"]


@pytest.mark.parametrize("router", POLICIES)
def test_every_router_serves_with_what_is_ready(router) -> None:
    policy, made = POLICIES[router](), table(a=state(), b=state(), c=state(draining=True))
    chosen = []
    for i in range(40):
        asked = ask(range(i * 5000, i * 5000 + 2000))
        now = float(i)
        made.publish("a", state(), now)
        made.publish("b", state(), now)
        choice = policy(asked, made.views(asked, now))
        assert isinstance(choice, Chosen)
        made.sent(choice.name, asked, now)
        made.ended(choice.name)
        chosen.append(choice.name)
    assert set(chosen) == {"a", "b"}
    none = table(c=state(draining=True))
    assert isinstance(policy(ask(), none.views(ask(), 0.0)), NoReplica)


def test_of_equals_the_replica_goes_first_that_was_sent_nothing_for_longest() -> None:
    made, names = table(a=state(), b=state(), c=state()), []
    for turn in range(6):
        asked = ask(range(turn * 10_000, turn * 10_000 + 2000))
        choice = choose(asked, made.views(asked, 0.0))
        assert isinstance(choice, Chosen)
        made.ended(choice.name, made.sent(choice.name, asked, 0.0))
        names.append(choice.name)
    assert names == ["a", "b", "c"] * 2


def test_round_robin_goes_round() -> None:
    policy, made = POLICIES["round-robin"](), table(a=state(), b=state(), c=state())
    choices = [policy(ask(), made.views(ask(), 0.0)) for _ in range(4)]
    assert [choice.name for choice in choices if isinstance(choice, Chosen)] == list("abca")


def test_power_of_two_takes_the_less_loaded_of_two_that_it_draws() -> None:
    policy, made = POLICIES["power-of-two"](), table(a=state(), b=state(), c=state())
    made["b"].open, made["c"].open = 1, 2
    choices = [policy(ask(), made.views(ask(), 0.0)) for _ in range(60)]
    assert {choice.name for choice in choices if isinstance(choice, Chosen)} == {"a", "b"}


def test_ray_prefix_follows_what_was_sent_unless_the_load_is_uneven() -> None:
    policy, made = POLICIES["ray-prefix"](), table(a=state(), b=state())

    def chosen(prompt: range) -> str:
        asked = ask(prompt)
        choice = policy(asked, made.views(asked, 0.0))
        assert isinstance(choice, Chosen)
        return choice.name

    home = chosen(range(2000))
    other = {"a": "b", "b": "a"}[home]
    assert [chosen(range(2000)) for _ in range(5)] == [home] * 5
    assert chosen(range(50_000, 51_000)) == other  # whose tree is smaller
    made[home].open = 9
    assert chosen(range(2000)) == home
    made[home].open = 10
    assert chosen(range(2000)) == other


def test_ray_prefix_forgets_what_it_was_told_first() -> None:
    policy, made = RayPrefixAware(most=40), table(a=state())
    for seed in range(200):
        asked = ask(range(seed * 10_000, seed * 10_000 + 2000))
        policy(asked, made.views(asked, 0.0))
    assert 0 < len(policy._trees["a"]) <= 40
    assert 0 < policy._sizes["a"] == sum(policy._trees["a"].values()) <= 40 * 512
    assert policy._matched("a", asked) > 0


def test_the_cost_of_a_decision_grows_with_the_replicas_and_no_faster(monkeypatch) -> None:
    """64 replicas and a prompt of 16,000 tokens: each replica is asked for some of its landmarks,
    as many as halve them, and estimated once."""
    draw = random.Random(0)
    prompts = [range(1000 * i, 1000 * i + 16_000) for i in range(64)]
    made = table(**{f"r{i:02}": state(draw.randrange(9000), prompts[i]) for i in range(64)})
    asked = ask(prompts[5])
    has, estimate = Replica.has, chooses._estimate
    looked: list[str] = []
    estimated: list[str] = []

    def looking(replica: Replica, landmark: int) -> bool:
        looked.append(replica.name)
        return has(replica, landmark)

    def estimating(request: RoutedRequest, view: ReplicaView, *how: Any) -> Any:
        estimated.append(view.name)
        return estimate(request, view, *how)

    monkeypatch.setattr(Replica, "has", looking)
    monkeypatch.setattr(chooses, "_estimate", estimating)
    assert sent_to(made, asked) == "r05"
    assert sorted(estimated) == sorted(f"r{i:02}" for i in range(64))
    assert max(Counter(looked).values()) <= 2 * len(asked.landmarks.hashes).bit_length() < 16


def many(count: int, draw: random.Random) -> tuple[Table, list[range]]:
    """A table of replicas that hold some of the prompts, with queues and free pages at random."""
    prompts = [range(k * 5000, k * 5000 + draw.randrange(200, 4000)) for k in range(40)]
    made = Table()
    for i in range(count):
        held = [token for prompt in draw.sample(prompts, 1) for token in prompt]
        free = draw.choice((10_000, 3000, 200))
        queued = draw.choice((0, 0, draw.randrange(9000)))
        made.publish(f"r{i:03}", state(queued, held, pages_free=free), 0.0)
    for replica in made:  # the first ones came before there were many
        made.publish(replica.name, msgspec.structs.replace(replica.state, digest=None), 0.0)
    return made, prompts


def test_of_many_replicas_those_that_are_looked_at_have_the_best() -> None:
    """What is chosen of the candidates is what would be chosen of all, or as good."""
    draw = random.Random(5)
    made, prompts = many(2 * table_module.FEW, draw)
    open_ones, same = [], 0
    for turn in range(150):
        prompt = draw.choice([*prompts, range(turn * 7919, turn * 7919 + 1500)])
        asked = ask(prompt, session=draw.choice(("x", "y", None)))
        seen = made.candidates(asked, 0.0)
        best, found = choose(asked, made.views(asked, 0.0)), choose(asked, seen)
        assert isinstance(best, Chosen)
        assert isinstance(found, Chosen)
        assert len(seen) <= table_module.FEW
        assert found.ttft <= best.ttft + 0.02
        same += found.name == best.name
        open_ones.append((found.name, made.sent(found.name, asked, 0.0)))
        if len(open_ones) > 99:
            made.ended(*open_ones.pop(draw.randrange(99)))
        if turn % 3 == 0:
            name = f"r{draw.randrange(2 * table_module.FEW):03}"
            made.publish(name, state(draw.randrange(4000), draw.choice(prompts)), 0.0)
    assert same >= 140


def test_many_replicas_that_are_idle_take_turns_and_none_is_forgotten() -> None:
    made = Table()
    for i in range(2 * table_module.FEW):
        made.publish(f"r{i:03}", state(), 0.0)
    made.publish("r000", state(draining=True), 0.0)
    served: Counter[str] = Counter()
    for turn in range(4 * table_module.FEW - 2):
        asked = ask(range(turn * 5000, turn * 5000 + 100))
        chosen = choose(asked, made.candidates(asked, 0.0))
        assert isinstance(chosen, Chosen)
        served[chosen.name] += 1
        made.ended(chosen.name, made.sent(chosen.name, asked, 0.0))
    assert {*served.values()} == {2}
    assert "r000" not in served
    made.remove("r001")
    named = made.candidates(ask(), 0.0, ("r000", "r001", "r099"))
    assert {each.name for each in named} & {"r000", "r001", "r099"} == {"r099"}
    every = made.candidates(ask(), 0.0, [replica.name for replica in made])
    assert len(every) <= table_module.FEW + 1
