"""n and best_of: several choices of one prompt."""

from tandem_testing.gateway_builders import events
from tandem_testing.waiting import until


async def test_choices_of_one_prompt_share_one_group(gateway, rack):
    await gateway.complete(["one", "two"], n=3, max_tokens=4)
    groups = [request.group for engine in rack.engines for request in engine.received if request.input_ids]
    assert {groups.count(group) for group in groups} == {3}
    assert len({*groups}) == 2
    assert len(gateway.chooser.queries) == 6, "each choice is placed by itself"
    await until(lambda: gateway.chooser.open == 0, 60, "every reservation is given back")


async def test_single_choice_has_no_group(gateway, rack):
    await gateway.complete(max_tokens=4)
    assert {request.group for engine in rack.engines for request in engine.received} == {""}


async def test_user_is_the_key_by_which_sessions_are_routed(gateway):
    await gateway.complete(max_tokens=2, user="ann")
    await gateway.complete(max_tokens=2)
    assert [query.session_key for query in gateway.chooser.queries] == ["ann", ""]


async def test_best_of_returns_the_likeliest_choices_best_first(gateway):
    fields = {"max_tokens": 6, "seed": 5, "logprobs": 0}
    every = (await gateway.complete(n=5, **fields)).json()["choices"]
    best = (await gateway.complete(n=2, best_of=5, **fields)).json()["choices"]

    def mean(choice: dict) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return sum(scores) / len(scores)

    ranked = sorted(every, key=mean, reverse=True)
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best] == [0, 1]


async def test_best_of_ranks_each_prompt_by_itself(gateway):
    answer = (await gateway.complete(["one", "two"], n=1, best_of=3, max_tokens=4, echo=True)).json()
    assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "two"]


async def test_best_of_usage_counts_all_tokens_and_hides_logprobs(gateway):
    answer = (await gateway.complete(best_of=3, max_tokens=4, ignore_eos=True)).json()
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["logprobs"] is None


async def test_best_of_equal_to_n_may_be_streamed(gateway):
    chunks = events(await gateway.complete(best_of=2, n=2, stream=True, max_tokens=3))
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1}
