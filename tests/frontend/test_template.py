import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from twolane.frontend.text.template import ChatTemplate

TURNS = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "  Grüße 'an' \"alle\" \n"},
    {"role": "assistant", "content": "Hi! "},
]
TEMPLATES = [
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}",
    # Llama's and Mistral's kind: trimming, namespaces, loop controls
    """{{- bos_token }}
    {%- set ns = namespace(count=0) %}
    {%- for m in messages %}
        {%- if m.role == 'system' %}{% continue %}{% endif %}
        {%- set ns.count = ns.count + 1 %}
        {{- '[' ~ ns.count ~ '] ' + m['content'] | trim }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '<answer>' }}{% endif %}""",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    """{% for m in messages %}{% set said = m.content %}{% generation %}
    {%- set said = said | trim %}{{ said ~ loop.index }}{% endgeneration %}[{{ said }}]
    {%- endfor %}""",
    "{% if tools is none and not documents %}{{ messages[-1].content[:2] }}{% endif %}",
    "{{ messages | map(attribute='content') | join('|') }}{{ dict(a=1) }}{{ thinking }}",
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
def test_texts_are_those_of_transformers(source, prompted):
    (theirs,), _ = render_jinja_template(
        [TURNS], chat_template=source, add_generation_prompt=prompted, thinking=1, **SPECIAL
    )
    ours = ChatTemplate(source, SPECIAL).render(
        TURNS, add_generation_prompt=prompted, variables={"thinking": 1}
    )
    assert ours == theirs


@pytest.mark.parametrize("source", TEMPLATES[:2])
@pytest.mark.parametrize("content", ["Hi! ", "Hi!", " The capital\nis", "Hi! </s> "])
def test_continued_texts_are_those_of_transformers(source, content):
    turns = [*TURNS[:2], {"role": "assistant", "content": content}]
    (theirs,), _ = render_jinja_template(
        [turns],
        chat_template=source,
        add_generation_prompt=False,
        continue_final_message=True,
        **SPECIAL,
    )
    ours = ChatTemplate(source, SPECIAL).render(
        turns, add_generation_prompt=False, continue_final_message=True
    )
    assert ours == theirs
    assert ours.rstrip().endswith(content.strip())


def test_a_message_that_is_not_shown_cannot_be_continued():
    for source in ("{{ messages[0].content }}", "{{ messages[-1].content | upper }}"):
        with pytest.raises(ValueError, match="drops or changes"):
            ChatTemplate(source, {}).render(TURNS, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ messages.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(TURNS)


def test_variables():
    source = "{{ enable_thinking }}{{ messages }}{{ bos_token }}{{ tools }}{{ namespace() }}"
    assert ChatTemplate(source, SPECIAL).variables == {"enable_thinking"}
