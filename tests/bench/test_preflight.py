"""What would have every request refused is told before the first one is sent."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from twolane.bench.preflight import BenchError, check
from twolane.bench.serve import run
from twolane.results.result import BenchConfig
from twolane.workload.spec import WorkloadSpec

from .scripted import DONE, ScriptedServer, text

MANY = WorkloadSpec(num_prompts=50)


def one_token(number, body):
    return [(float(number + 1), text("a", "length")), (float(number + 1), DONE)]


@contextlib.asynccontextmanager
async def serving(app):
    """Serve an application; the block gets its address."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def bench(server, **fields):
    """Run against a scripted server that lists one model; return its result, or the error, and what
    it was sent."""

    async def work():
        async with server.serving() as url:
            return await run(BenchConfig(base_url=url, workload=MANY, **fields), clock=server.clock)

    try:
        return asyncio.run(work()), server.bodies
    except BenchError as error:
        return str(error), server.bodies


def test_a_model_that_is_not_served_is_refused_with_those_that_are():
    error, sent = bench(ScriptedServer(lambda number, body: (404, "no such model")), model="WRONG")
    assert "--model WRONG is not served" in error
    assert "serves scripted-model" in error
    assert [body["model"] for body in sent] == ["WRONG"]


def test_a_model_that_is_served_and_not_listed_is_measured():
    def typed(number, body):
        kinds = {headers["Content-Type"] for headers in server.headers}
        return one_token(number, body) if kinds == {"application/json"} else (415, "no JSON")

    server = ScriptedServer(typed)
    result, sent = bench(server, model="alias")
    assert result.model == "alias"
    assert (len(result.records), len(sent)) == (50, 51)


@pytest.mark.parametrize("model", [None, "scripted-model"])
def test_a_listed_model_costs_no_request(model):
    result, sent = bench(ScriptedServer(one_token), model=model)
    assert result.model == "scripted-model"
    assert len(sent) == 50


def test_a_path_that_is_not_served_is_refused():
    error, sent = bench(ScriptedServer(one_token), endpoint="/v2/completions")
    assert "--endpoint /v2/completions is not served at http://127.0.0.1:" in error
    assert not sent


@pytest.mark.parametrize(
    ("model", "key", "told"), [(None, None, "needed"), ("m", None, "needed"), ("m", "k", "wrong")]
)
def test_a_key_that_is_not_taken_is_refused(model, key, told):
    async def refuse(request):
        asked.append(request.method)
        return web.json_response({"error": {"message": "who?"}}, status=401)

    async def work():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", refuse)
        async with serving(app) as url:
            await run(BenchConfig(base_url=url, workload=MANY, model=model, api_key=key))

    asked = []
    with pytest.raises(BenchError, match=f"--api-key is {told}"):
        asyncio.run(work())
    assert asked.count("POST") == asked.count("GET") - 1 <= 1


@pytest.mark.parametrize(
    ("get", "post", "model", "told"),
    [
        (403, 400, None, None),  # as AWS's gateways answer GET where only POST is served
        (404, 422, None, None),
        (405, 400, "m", None),
        (404, 404, "m", "/v1/completions is not served at .*: status 404"),
        (404, 404, "x", "/v1/completions is not served at .*, or not for --model x: status 404"),
        (405, 400, "x", "--model x is not served at .*, which serves m: status 400"),
        (403, 403, "m", "--api-key is needed"),
        (501, 400, None, "/v1/models lists no model; name one with --model"),
    ],
)
def test_what_other_servers_answer_refuses_no_run_that_they_would_take(get, post, model, told):
    """Models without a name are none that can be asked for."""

    async def models(request):
        listed = {"data": [{"id": None}, {"id": "m"}]}
        return web.json_response(listed, status=200 if get != 501 else 404)

    async def work():
        app = web.Application()
        app.router.add_get("/v1/models", models)
        for method, status in (("GET", get), ("POST", post)):
            answer = web.json_response({"error": "no"}, status=status)
            app.router.add_route(method, "/v1/completions", answering(answer))
        async with serving(app) as url:
            return await check(BenchConfig(base_url=url, model=model), lambda model: b"{}")

    if told is None:
        assert asyncio.run(work()) == "m"
        return
    with pytest.raises(BenchError, match=told):
        asyncio.run(work())


def answering(answer):
    async def handler(request):
        return answer

    return handler


@pytest.mark.parametrize("model", [None, "m"])
def test_a_server_that_is_down_is_told(model):
    config = BenchConfig(base_url="http://127.0.0.1:9", workload=MANY, model=model)
    with pytest.raises(BenchError, match=r"/v1/models does not answer: .*; is the server up"):
        asyncio.run(run(config))
