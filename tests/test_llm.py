import pytest

from twolane import LLM, SamplingParams

from .api.serving import alive, write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=4)


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


def test_chats(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = SamplingParams(temperature=0, max_tokens=None)
    (one,) = llm.chat(question, greedy)
    assert "Paris" in one.text
    assert one.finish_reason == "stop"
    assert [o.text for o in llm.chat([question, question], greedy)] == [one.text] * 2


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


def test_wrong_prompts_are_value_errors(tiny):
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens"):
        tiny.generate([[1], []])
    with pytest.raises(ValueError, match=r"outside 0\.\.127"):
        tiny.generate([[128]])
    with pytest.raises(ValueError, match="without a tokenizer"):
        tiny.generate("text")
    assert tiny.generate([[1]], GREEDY)


def test_wrong_settings_are_value_errors():
    with pytest.raises(ValueError, match="system 'nope' is unknown"):
        LLM("smollm2-135m-instruct", system="nope")
    with pytest.raises(ValueError, match="no model 'nope'"):
        LLM("nope")
    with pytest.raises(TypeError, match="gpus"):
        LLM("smollm2-135m-instruct", gpus=8)


def test_closing_ends_the_engine(tmp_path):
    llm = LLM(str(write_tiny_model(tmp_path)), load_format="dummy", kv_tokens=1000)
    pid = llm._engine.process.pid
    assert alive(pid)
    llm.close()
    llm.close()
    assert not alive(pid)
