import asyncio
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
from llguidance import LLMatcher
from msgspec.structs import replace

from twolane import LLM, SamplingParams
from twolane.frontend.engine_client import EngineError
from twolane.frontend.generation import GenerationFailed, GenerationRefused

from .serving import PATIENCE, alive, children, wait_for, write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=4)
CHAT = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m-instruct", kv_tokens=20000, system="chunked") as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    with LLM(str(path), load_format="dummy", kv_tokens=100_000) as llm:
        yield llm


def test_generates_from_one_text(llm):
    (output,) = llm.generate("The capital of France is", GREEDY)
    assert "Paris" in output.text
    assert output.prompt == "The capital of France is"
    assert (output.finish_reason, len(output.token_ids)) == ("length", 4)


def test_answers_keep_the_order_of_the_prompts(llm):
    prompts = [f"{number} plus one is" for number in ("One", "Two", "Three", "Four")]
    together = [o.text for o in llm.generate(prompts, GREEDY)]
    assert together == [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]


def test_token_ids_are_the_same_as_their_text(llm):
    (text,) = llm.generate("The capital of France is", GREEDY)
    (ids,) = llm.generate([text.prompt_token_ids], GREEDY)
    assert (ids.text, ids.prompt) == (text.text, None)


def test_a_salt_keeps_prefixes_apart(llm):
    prompt = "one, two, three, four, five, six, seven, eight, nine, ten, " * 4
    salts = ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"})
    found = [llm.generate(prompt, GREEDY, **salt)[0].cached_tokens > 0 for salt in salts]
    assert found[1:] == [True, False, True, False]
    for wrong in ("", "\ud800"):
        with pytest.raises(ValueError, match="cache_salt"):
            llm.generate(prompt, GREEDY, cache_salt=wrong)


def test_chats(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (one,) = llm.chat(question, CHAT)
    assert "Paris" in one.text
    assert one.finish_reason == "stop"
    assert [o.text for o in llm.chat([question, question], CHAT)] == [one.text] * 2


def test_parameters_for_each_prompt(tiny):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = tiny.generate([[5, 6], [7]], params)
    assert [len(o.token_ids) for o in outputs] == [1, 5]
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        tiny.generate([[5, 6], [7]], params[:1])


def test_more_prompts_than_run_at_once(tiny):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    outputs = tiny.generate([[3 + n % 100, 4] for n in range(1500)], params)
    assert len(outputs) == 1500
    assert {len(o.token_ids) for o in outputs} == {2}


def test_a_stream_is_the_answer_in_pieces(llm):
    prompt = "The capital of France is"
    (whole,) = llm.generate(prompt, GREEDY)
    pieces = list(llm.stream(prompt, GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason
    ids = whole.prompt_token_ids
    assert "".join(piece.text for piece in llm.stream(ids, GREEDY)) == whole.text


def test_a_conversation_streams_too(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in "".join(piece.text for piece in llm.stream(question, CHAT))


def test_whoever_stops_reading_gives_the_rest_up(tiny):
    for piece in tiny.stream([5, 6], SamplingParams(max_tokens=60_000, ignore_eos=True)):
        assert piece.token_ids
        break
    assert tiny.generate([[1]], GREEDY)
    wait_for(lambda: tiny._engine.stats.running == 0)


def test_a_stream_may_be_collected_anywhere(tiny):
    """In a cycle it is the collector's, who runs in whatever thread makes objects."""
    pieces = tiny.stream([5, 6], SamplingParams(max_tokens=60_000, ignore_eos=True))
    assert next(pieces).token_ids
    cycle = [pieces]
    cycle.append(cycle)
    del pieces, cycle
    collected = threading.Event()
    tiny._loop.call_soon_threadsafe(lambda: (gc.collect(), collected.set()))
    assert collected.wait(PATIENCE)
    assert tiny.generate([[1]], GREEDY)
    wait_for(lambda: tiny._engine.stats.running == 0)


def test_a_stop_string_ends_the_answer(llm):
    (plain,) = llm.generate("The capital of France is", GREEDY)
    assert plain.text.startswith(" Paris.")
    (output,) = llm.generate("The capital of France is", GREEDY, stop=["is."])
    assert (output.text, output.finish_reason) == (" Par", "stop")
    assert output.outputs[0].stop_reason == "is."
    more = {"stop": "is.", "include_stop_str_in_output": True}
    assert llm.generate("The capital of France is", GREEDY, **more)[0].text == " Paris."
    assert "".join(p.text for p in llm.stream("The capital of France is", GREEDY, stop="is.")) == (
        " Par"
    )


def test_parameters_of_vllm_may_have_stop_strings_and_several_answers(llm):
    """Each prompt its own; keyword arguments come before them."""
    prompt = "The capital of France is"
    first, second = (replace(GREEDY, stop=[" Paris"]), replace(GREEDY, n=2, stop="."))
    one, two = llm.generate([prompt] * 2, [first, second])
    assert ([o.text for o in one.outputs], one.outputs[0].stop_reason) == ([""], " Paris")
    assert [o.text for o in two.outputs] == [" Paris"] * 2
    more = {"include_stop_str_in_output": True, "truncate_prompt_tokens": 3}
    [cut] = llm.generate(prompt, replace(second, **more), n=1)
    assert (len(cut.prompt_token_ids), len(cut.outputs)) == (3, 1)
    chat = [{"role": "user", "content": prompt}]
    assert len(llm.chat(chat, second)[0].outputs) == 2
    assert {piece.index for piece in llm.stream(prompt, second)} == {0, 1}
    for wrong in ({"n": 0}, {"stop": ""}, {"truncate_prompt_tokens": 0}):
        with pytest.raises(ValueError, match=min(wrong)):
            llm.generate(prompt, replace(GREEDY, **wrong))


def test_only_the_last_tokens_of_a_prompt_are_kept(llm):
    whole = llm.generate("It is known that the capital of France is", GREEDY)[0]
    (cut,) = llm.generate(whole.prompt, GREEDY, truncate_prompt_tokens=5)
    assert cut.prompt_token_ids == whole.prompt_token_ids[-5:]
    (ids,) = llm.generate(whole.prompt_token_ids, GREEDY, truncate_prompt_tokens=5)
    assert (ids.prompt_token_ids, ids.text) == (cut.prompt_token_ids, cut.text)
    chat = [{"role": "user", "content": "Hello"}]
    (turn,) = llm.chat(chat, GREEDY, truncate_prompt_tokens=3)
    assert turn.prompt_token_ids == llm.chat(chat, GREEDY)[0].prompt_token_ids[-3:]
    streamed = llm.stream(whole.prompt, GREEDY, truncate_prompt_tokens=5)
    assert "".join(piece.text for piece in streamed) == cut.text
    (full,) = llm.generate(whole.prompt_token_ids, GREEDY, truncate_prompt_tokens=-1)
    assert full.prompt_token_ids == whole.prompt_token_ids
    room = len(whole.prompt_token_ids)
    with pytest.raises(ValueError, match="min_tokens is too large"):
        llm.generate(whole.prompt, SamplingParams(min_tokens=8193 - room, max_tokens=None))
    for count in (0, -2):
        with pytest.raises(ValueError, match="truncate_prompt_tokens"):
            llm.generate("a", GREEDY, truncate_prompt_tokens=count)


def test_several_answers_to_each_prompt(llm):
    params = SamplingParams(temperature=1.5, top_k=10, max_tokens=8, seed=3)
    outputs = llm.generate(["Once upon a time", "The sky"], params, n=3)
    assert [[o.index for o in output.outputs] for output in outputs] == [[0, 1, 2]] * 2
    assert len({answer.text for answer in outputs[0].outputs}) == 3
    again = llm.generate("The sky", params, n=3)[0]
    assert [o.text for o in again.outputs] == [o.text for o in outputs[1].outputs]
    pieces = list(llm.stream("The sky", params, n=3))
    for place, answer in enumerate(again.outputs):
        assert "".join(p.text for p in pieces if p.index == place) == answer.text


def test_log_probabilities_come_with_the_tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate("The capital of France is", params)
    assert [entry.token for entry in output.logprobs] == output.token_ids
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in output.logprobs)
    assert [e.token for e in output.prompt_logprobs] == output.prompt_token_ids[1:]
    alone = SamplingParams(temperature=0, max_tokens=4, logprobs=2)  # the prompt's are not streamed
    pieces = [entry for piece in llm.stream(output.prompt, alone) for entry in piece.logprobs]
    assert [entry.token for entry in pieces] == output.token_ids
    assert llm.generate("a", GREEDY)[0].logprobs is None


def test_an_answer_has_allowed_tokens_alone(llm):
    yes, no = 1000, 1001
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, allowed_token_ids=(yes, no))
    [answer] = llm.generate(["The sky is blue: yes or no?"], params)
    assert answer.token_ids[0] in (yes, no)
    for wrong in ((), (-1,), (10**6,)):
        with pytest.raises((ValueError, GenerationRefused), match="allowed_token_ids"):
            llm.generate("a", SamplingParams(allowed_token_ids=wrong))
    with pytest.raises(ValueError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=(yes,), grammar="x")


def test_an_answer_has_no_bad_words(llm):
    prompt = "The capital of France is"
    params = [replace(GREEDY, bad_words=words) for words in (("Paris",), (" Paris", "Lyon"))]
    assert not any("Paris" in output.text for output in llm.generate([prompt] * 2, params))
    pieces = llm.stream(prompt, params[0])
    assert "Paris" not in "".join(piece.text for piece in pieces)
    for wrong in ("Paris", ("",), ("x" * 65,), ("\ud800",), (1,)):
        with pytest.raises(ValueError, match="bad_words"):
            llm.generate(prompt, SamplingParams(bad_words=wrong))
    with pytest.raises(ValueError, match="bad_words"):
        SamplingParams(bad_words=("x",), grammar="x")


def test_a_model_that_does_not_think_has_no_budget_for_it(llm):
    with pytest.raises(ValueError, match="thinking_token_budget needs a model"):
        llm.generate("a", SamplingParams(thinking_token_budget=3))
    assert llm.generate("a", SamplingParams(thinking_token_budget=-1))
    for wrong in ({"thinking_token_budget": -2}, {"thinking_token_budget": 1, "grammar": "x"}):
        with pytest.raises(ValueError, match="thinking_token_budget"):
            SamplingParams(**wrong)


def test_an_answer_follows_a_grammar(llm):
    grammar = LLMatcher.grammar_from_regex("(Paris|Rome)!")
    params = SamplingParams(temperature=0, grammar=grammar)
    prompts = ["The capital of France is", "The capital of Italy is"]
    assert [o.text for o in llm.generate(prompts, params)] == ["Paris!", "Rome!"]
    assert "".join(piece.text for piece in llm.stream(prompts[1], params)) == "Rome!"
    with pytest.raises(GenerationRefused, match="grammar"):
        llm.generate(prompts[0], SamplingParams(grammar="start: nothing"))


def test_a_bar_shows_on_demand_only(tiny, capfd):
    tiny.generate([[5]] * 3, GREEDY)
    assert capfd.readouterr().err == ""
    tiny.generate([[5]] * 3, GREEDY, progress=True)
    shown = capfd.readouterr().err
    assert "3/3" in shown
    assert "output tokens/s" in shown


def test_works_inside_an_event_loop(tiny):
    async def program():
        direct = tiny.generate([[5, 6]], GREEDY)
        beside = await asyncio.to_thread(tiny.generate, [[5, 6]], GREEDY)
        return direct[0].token_ids == beside[0].token_ids

    assert asyncio.run(program())


def test_an_interrupt_breaks_off_and_leaves_the_llm_usable(tmp_path):
    program = f"""
import threading, time
from twolane import LLM, SamplingParams
def tell():
    while not llm._engine.stats.running:
        time.sleep(0.01)
    print("running", flush=True)
with LLM({str(write_tiny_model(tmp_path))!r}, load_format="dummy", kv_tokens=100_000) as llm:
    threading.Thread(target=tell).start()
    try:
        llm.generate([[5, 6]] * 50, SamplingParams(max_tokens=60_000, ignore_eos=True))
    except KeyboardInterrupt:
        print(len(llm.generate([[5, 6]] * 3, SamplingParams(max_tokens=2, ignore_eos=True))))
        print(llm._engine.stats.running + llm._engine.stats.waiting)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "running\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE) == ("3\n0\n", "")
            assert process.returncode == 0
        finally:
            process.kill()


def test_an_engine_that_dies_raises(tmp_path):
    llm = LLM(str(write_tiny_model(tmp_path)), load_format="dummy", kv_tokens=100_000)
    pieces = llm.stream([5, 6], SamplingParams(max_tokens=60_000, ignore_eos=True))
    next(pieces)
    os.kill(llm._engine.process.pid, signal.SIGKILL)
    with pytest.raises(GenerationFailed, match="signal 9"):
        list(pieces)
    with pytest.raises(EngineError, match="signal 9"):
        llm.generate([[5, 6]])
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[5, 6]])


def test_wrong_prompts_are_value_errors(tiny):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        tiny.generate([[1], []])
    with pytest.raises(ValueError, match="outside 0 to 127"):
        tiny.generate([[128]])
    with pytest.raises(ValueError, match="without a tokenizer"):
        tiny.generate("text")
    with pytest.raises(ValueError, match="without a tokenizer"):
        tiny.stream("text")
    with pytest.raises(ValueError, match="stop needs text"):
        tiny.generate([[1]], stop="x")
    with pytest.raises(ValueError, match="stop: must be a string of 1 to"):
        tiny.generate([[1]], stop=["x", ""])
    with pytest.raises(ValueError, match="n: Input should be greater than or equal to 1"):
        tiny.generate([[1]], n=0)
    with pytest.raises(TypeError, match="stops"):
        tiny.generate([[1]], stops="x")
    with pytest.raises(TypeError, match="chat_template_kwargs"):
        tiny.generate([[1]], chat_template_kwargs={})
    for wrong in (5, None, [5, "x"], [["x"]], {"prompt": "x"}):
        with pytest.raises(ValueError, match="prompts: must be a string, a list of strings"):
            tiny.generate(wrong)
    for wrong, name in (
        (5, "messages"),
        ([], "messages"),
        ([{"role": "x"}], r"messages\[0\].role"),
    ):
        with pytest.raises(ValueError, match=name):
            tiny.chat(wrong)
    with pytest.raises(ValueError, match=r"messages\[0\]\[0\].nope"):
        tiny.chat([[{"role": "user", "nope": 1}], [{"role": "user", "content": "x"}]])
    assert tiny.generate([[1]], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([1, 2.0], {}, "prompts: must be a string"),
        ([1, True], {}, "prompts: must be a string"),
        ([1], {"max_tokens": 100.0}, "sampling parameters: .*float.*max_tokens"),
        ([1], {"top_k": numpy.int64(3)}, r"sampling parameters: .*numpy\.int64"),
        ([1], {"seed": numpy.int64(3)}, r"sampling parameters: .*numpy\.int64"),
        ([1], {"seed": 1.5}, "sampling parameters: .*float.*seed"),
        ([1], {"stop_token_ids": [5.5]}, "sampling parameters: .*float.*stop_token_ids"),
        ([1], {"logit_bias": {5: True}}, "sampling parameters: .*bool.*logit_bias"),
    ],
)
def test_wrong_types_are_value_errors_and_end_no_engine(tiny, prompt, fields, message):
    params = SamplingParams(**fields)
    with pytest.raises(ValueError, match=message):
        tiny.generate([prompt], params)
    with pytest.raises(ValueError, match=message):
        tiny.stream(prompt, params)
    assert tiny.generate([[1]], GREEDY)


def test_what_no_answer_could_show_is_refused(tiny):
    with pytest.raises(ValueError, match="embeds is for"):
        tiny.generate([[5]], SamplingParams(embeds=True))
    with pytest.raises(ValueError, match="prompt_logprobs cannot be streamed"):
        tiny.stream([5, 6], SamplingParams(prompt_logprobs=1))


def test_wrong_settings_are_value_errors():
    with pytest.raises(ValueError, match="system 'nope' is unknown"):
        LLM("smollm2-135m-instruct", system="nope")
    with pytest.raises(ValueError, match="no model 'nope'"):
        LLM("nope")
    with pytest.raises(TypeError, match="gpus"):
        LLM("smollm2-135m-instruct", gpus=8)
    for name in ("tbt_buffer", "transport"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0, not -0.001"):
            LLM("smollm2-135m-instruct", **{name: -0.001})
        for seconds in (math.nan, math.inf):
            with pytest.raises(ValueError, match=f"{name} must be finite, not {seconds}"):
                LLM("smollm2-135m-instruct", **{name: seconds})


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"seed": "7"}, "`int`"),
        ({"device": 3}, "`str`"),
        ({"disaggregated": "yes"}, "`bool`"),
        ({"levels": 5}, "`array | null`"),
        ({"lora": {"a": 1}}, "`str`"),
        ({"slo": {"tbt": 0.02}}, "Slo"),
        ({"profile": Path("p")}, "PosixPath"),
    ],
)
def test_settings_of_a_wrong_type_are_named(wrong, expected):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"^{name} has the wrong type: .*{expected}"):
        LLM("smollm2-135m-instruct", **wrong)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_whose_the_llm_is(tiny):
    pieces = tiny.stream([5, 6], GREEDY)
    next(pieces)
    if not (child := os.fork()):
        signal.alarm(round(PATIENCE))
        try:
            tiny.generate([[5, 6]])
        except RuntimeError as error:
            tiny.close()
            os._exit("forked" in str(error))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert list(pieces)


def test_an_engine_ends_with_the_last_reference_to_it(tmp_path):
    llm = LLM(str(write_tiny_model(tmp_path)), load_format="dummy", kv_tokens=1000)
    pid, folder, thread = llm._engine.process.pid, llm._engine._folder.path, llm._thread
    assert llm.generate([[1]], GREEDY)
    del llm
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not alive(pid)
    assert not folder.exists()


def test_a_program_that_does_not_close_leaves_nothing_behind(tmp_path):
    program = f"""
from twolane import LLM
llm = LLM({str(write_tiny_model(tmp_path))!r}, load_format="dummy", kv_tokens=1000)
print(llm._engine._folder.path)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert not Path(run.stdout.strip()).exists()


@pytest.mark.full
def test_nothing_outlives_a_program_whose_fork_does(tmp_path):
    """The fork holds its pipes and sockets open."""
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    model = write_tiny_model(tmp_path)
    (model / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words}))
    program = f"""
import os, signal
from twolane import LLM
llm = LLM({str(model)!r}, load_format="dummy", kv_tokens=1000)
if fork := os.fork():
    print(fork, flush=True)
signal.pause()
"""
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        fork = int(run.stdout.readline())
    finally:
        started = children(run.pid)
        run.kill()
        run.wait()
    started.discard(fork)
    assert len(started) == 2  # the engine, and what tokenises
    wait_for(lambda: not any(map(alive, started)))
    assert alive(fork)
    os.kill(fork, signal.SIGKILL)


def test_closing_ends_the_engine_and_what_it_does(tmp_path):
    """Also when several threads close it, and again. Calls in other threads fail; a stream may be
    closed later, and who reads on is told why there is no more."""
    llm = LLM(str(write_tiny_model(tmp_path)), load_format="dummy", kv_tokens=100_000)
    params, pid = SamplingParams(max_tokens=60_000, ignore_eos=True), llm._engine.process.pid
    kept, read = (llm.stream([5, 6], params) for _ in range(2))
    assert next(kept).token_ids
    assert next(read).token_ids
    with ThreadPoolExecutor(7) as threads:
        calls = [threads.submit(llm.generate, [[5, 6]] * 400, params) for _ in range(3)]
        while len(llm._engine._sinks) < 1202:
            time.sleep(0.01)
        assert alive(pid)
        assert list(threads.map(lambda _: llm.close(), range(4))) == [None] * 4
        for call in calls:
            with pytest.raises(GenerationFailed, match="the engine was closed"):
                call.result(PATIENCE)
    llm.close()
    assert not alive(pid)
    kept.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        next(read)
