"""Chat templates in the forms of widely used models, each written anew and as short as it can be.

What is kept is how they read messages: text or parts, which roles, whether turns must alternate,
how they write tools, calls and results, what they do with reasoning, and what they refuse.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Form:
    """A template, and how a user of `transformers` has to write messages for it."""

    source: str
    parts: bool = False
    """It walks over parts; content that is text is not shown, or not as text."""
    arguments: Literal["object", "text"] = "object"
    calls: bool = False
    """It shows tool calls."""
    null: bool = True
    """Null is right as the content beside calls; otherwise it is empty text."""
    developer: bool = False
    """It has a role "developer"; otherwise it is written as "system"."""
    first_part: bool = False
    """It shows the first part of the system's message alone; several are written as text."""


PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CALL = """{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}"""
HERMES_TOOLS = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}"""

QWEN2 = (
    """{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"""
    + PROMPT
)
QWEN25 = (
    HERMES_TOOLS
    + """{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' ~ m.role }}{%- if m.content %}{{- '\\n' ~ m.content }}{%- endif %}
"""
    + CALL
    + "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    + PROMPT
)
QWEN3 = (
    HERMES_TOOLS
    + """{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}{{- '<|im_start|>assistant\\n' ~ content }}"""
    + CALL
    + """{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}"""
    + PROMPT
    + """{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
)
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}
{% set system = messages[0]['content'] %}{% else %}{% set turns = messages %}
{% set system = false %}{% endif %}{% for m in turns %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}{% if loop.index0 == 0 and system != false %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}
{% else %}{% set content = m['content'] %}{% endif %}
{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""
LLAMA3 = """{% for m in messages %}
{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n'
 + m['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}
{% endfor %}{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
LLAMA31 = """{{- bos_token }}{%- if not date_string is defined %}
{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}
{%- endfor %}{%- endif %}{{- system }}{{- '<|eot_id|>' }}
{%- for m in messages %}
{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim }}
{{- '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if m.content is mapping or m.content is iterable and m.content is not string %}
{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token + ' ' }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""
MISTRAL_TOOLS = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}
{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}{%- for m in turns %}{%- if m.role == 'user' %}
{%- if tools is not none and loop.last %}{{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) }}
{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m.content }}
{%- else %}{{- '[INST] ' + m.content }}{%- endif %}{{- '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}
{%- if not call.id is defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + m.content | string }}
{{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}
{%- endfor %}"""
MISTRAL_SMALL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}
{{- '[SYSTEM_PROMPT]' ~ (m.content if m.content is string else m.content[0].text) }}
{{- '[/SYSTEM_PROMPT]' }}{% elif m.role == 'user' %}{{ '[INST]' }}{% if m.content is string %}
{{- m.content }}{% else %}{{ m.content | map(attribute='text') | join('\\n') }}{% endif %}
{{- '[/INST]' }}{% else %}{{ m.content if m.content is string else m.content[0].text }}
{{- eos_token }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
GEMMA3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
{%- if messages[0]['content'] is string -%}
{%- set first = messages[0]['content'] + '\\n\\n' -%}
{%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
{%- set turns = messages[1:] -%}{%- else -%}{%- set first = '' -%}
{%- set turns = messages -%}{%- endif -%}{%- for m in turns -%}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
{%- if m['content'] is string -%}{{ m['content'] | trim }}
{%- elif m['content'] is iterable -%}{%- for item in m['content'] -%}
{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
PHI3 = """{% for m in messages %}{% if m['role'] == 'system' %}
{{ '<|system|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'user' %}
{{ '<|user|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
ZEPHYR = """{% for m in messages %}
{% if m['role'] in ('user', 'system', 'assistant') %}
{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
DEEPSEEK = """{% set ns = namespace(system='') %}{% for m in messages %}
{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}{% endfor %}
{{ bos_token }}{{ ns.system }}{% for m in messages %}{% if m['role'] == 'user' %}
{{ '<User>' + m['content'] }}{% endif %}
{% if m['role'] == 'assistant' and m['content'] is none %}
{% for call in m['tool_calls'] %}{{ '<Call>' + call['type'] + '<sep>' + call['function']['name'] }}
{{ '\\n```json\\n' + call['function']['arguments'] + '\\n```<End>' }}{% endfor %}{{ eos_token }}
{% endif %}{% if m['role'] == 'assistant' and m['content'] is not none %}
{% set content = m['content'] %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{ '<Assistant>' + content + eos_token }}{% endif %}{% if m['role'] == 'tool' %}
{{ '<Output>' + m['content'] + '<End>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<Assistant><think>\\n' }}{% endif %}"""
COMMAND_R = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}
{% set turns = messages %}{% set system = false %}{% endif %}{% if system != false %}
{{ '<|TURN|><|SYSTEM|>' + system + '<|END|>' }}{% endif %}{% for m in turns %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{% if m['role'] == 'user' %}{{ '<|TURN|><|USER|>' + m['content'].strip() + '<|END|>' }}
{% elif m['role'] == 'assistant' %}
{{ '<|TURN|><|CHATBOT|>' + m['content'].strip() + '<|END|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|TURN|><|CHATBOT|>' }}{% endif %}"""
GRANITE = """{%- if tools %}{{- '<|role|>available_tools<|end|>\\n' ~ (tools | tojson(indent=4)) }}
{{- '<|end_of_text|>\\n' }}{%- endif %}{%- for m in messages %}{%- if m['role'] == 'tool' %}
{{- '<|role|>tool_response<|end|>' + m['content'] + '<|end_of_text|>\\n' }}
{%- elif m['role'] == 'assistant' and m.tool_calls %}
{{- '<|role|>assistant<|end|><|tool_call|>' ~ (m.tool_calls | map(attribute='function') | list
 | tojson) ~ '<|end_of_text|>\\n' }}
{%- else %}{{- '<|role|>' + m['role'] + '<|end|>' + m['content'] + '<|end_of_text|>\\n' }}
{%- endif %}{%- if loop.last and add_generation_prompt %}{{- '<|role|>assistant<|end|>' }}
{%- endif %}{%- endfor %}"""
GLM4 = """[gMASK]<sop>{%- for item in messages %}{%- if item['role'] == 'system' %}<|system|>
{{ item['content'] }}{%- elif item['role'] == 'user' %}<|user|>
{{ item['content'] }}{%- elif item['role'] == 'assistant' %}<|assistant|>
{{ item['content'] }}{%- elif item['role'] == 'tool' %}<|observation|>
{{ item['content'] }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""
VICUNA = """{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}
{{ messages[0]['content'] + ' ' }}{% else %}{% set turns = messages %}{% endif %}
{% for m in turns %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}
{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
ALPACA = """{% for m in messages %}{% if m['role'] == 'user' %}
{{ '### Instruction:\\n' + m['content'] + '\\n\\n' }}{% elif m['role'] == 'assistant' %}
{{ '### Response:\\n' + m['content'] + '\\n\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"""
FALCON = """{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}
{% if m['role'] == 'system' %}{{ 'System: ' }}{% elif m['role'] == 'user' %}{{ 'User: ' }}
{% elif m['role'] == 'assistant' %}{{ 'Falcon: ' }}{% endif %}{{ m['content'] }}{% endfor %}
{% if add_generation_prompt %}{{ '\\nFalcon:' }}{% endif %}"""
HARMONY = """{%- for m in messages %}{%- if m.role in ('system', 'developer') %}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' %}{%- if 'tool_calls' in m %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions to=assistant<|message|>' + m.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
VISION = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}
{% for piece in m['content'] %}{% if piece['type'] == 'image' %}{{ '<image>' }}
{% elif piece['type'] == 'text' %}{{ piece['text'] }}{% endif %}{% endfor %}
{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{% endif %}"""
SMOLVLM = """{% for m in messages %}{{ m['role'] | capitalize }}
{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}
{% endfor %}{{ '<end_of_utterance>\\n' }}{% endfor %}{% if add_generation_prompt %}
{{ 'Assistant:' }}{% endif %}"""
EXAONE = """{% for m in messages %}{% if loop.first and m['role'] != 'system' %}
{{ '[|system|][|endofturn|]\\n' }}{% endif %}{{ '[|' + m['role'] + '|]' + m['content'] }}
{% if m['role'] == 'user' %}{{ '\\n' }}{% else %}{{ '[|endofturn|]\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"""
OLMO2 = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}
{{ '<|system|>\\n' + m['content'] + '\\n' }}{% elif m['role'] == 'user' %}
{{ '<|user|>\\n' + m['content'] + '\\n' }}{% elif m['role'] == 'assistant' %}
{% if not loop.last %}{{ '<|assistant|>\\n' + m['content'] + eos_token + '\\n' }}{% else %}
{{ '<|assistant|>\\n' + m['content'] + eos_token }}{% endif %}{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
MAGISTRAL = """{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}
{{- '[SYSTEM_PROMPT]' }}{%- if m.content is string %}{{- m.content }}{%- else %}
{%- for block in m.content %}{%- if block.type == 'thinking' %}
{{- '[THINK]' + block.thinking + '[/THINK]' }}{%- else %}{{- block.text }}{%- endif %}
{%- endfor %}{%- endif %}{{- '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}{{- '[INST]' }}
{%- if m.content is string %}{{- m.content }}{%- else %}{%- for block in m.content %}
{%- if block.type == 'text' %}{{- block.text }}{%- else %}
{{- raise_exception('Only text chunks are supported') }}{%- endif %}{%- endfor %}{%- endif %}
{{- '[/INST]' }}{%- elif m.role == 'assistant' %}
{%- if not m.content and not m.tool_calls %}{{- raise_exception('No content') }}{%- endif %}
{%- if m.content is string %}{{- m.content }}{%- elif m.content | length > 0 %}
{%- for block in m.content %}{%- if block.type == 'text' %}{{- block.text }}
{%- elif block.type == 'thinking' %}{{- '[THINK]' + block.thinking + '[/THINK]' }}{%- else %}
{{- raise_exception('Only text and thinking chunks are supported') }}{%- endif %}{%- endfor %}
{%- endif %}{%- for call in m.tool_calls or [] %}{%- if call.id | length != 9 %}
{{- raise_exception('Tool call must have an id of 9 characters or numbers.') }}{%- endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
{{- call.function.arguments | tojson }}{%- endfor %}{{- eos_token }}
{%- else %}{%- if m.tool_call_id | length != 9 %}
{{- raise_exception('Tool message must have a tool_call_id of 9 characters') }}{%- endif %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""
GLM4_0414 = """[gMASK]<sop>{%- if tools %}<|system|>
{%- for tool in tools %}
## {{ tool.function.name }}
{{ tool.function | tojson }}
{%- endfor %}{%- endif %}{%- for m in messages %}
{%- set meta = m.get("metadata", "") %}
{%- if m.role == 'assistant' and meta %}<|assistant|>{{ meta }}
{{ m.content }}{%- elif m.role == 'observation' %}<|observation|>
{{ m.content }}{%- elif m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>
{{ m.content }}{%- endif %}{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

TEMPLATES: dict[str, Form] = {
    "qwen2": Form(QWEN2),
    "qwen2.5": Form(QWEN25, calls=True),
    "qwen3": Form(QWEN3, calls=True),
    "llama2": Form(LLAMA2),
    "llama3": Form(LLAMA3),
    "llama3.1": Form(LLAMA31, calls=True),
    "mistral": Form(MISTRAL),
    "mistral-tools": Form(MISTRAL_TOOLS, calls=True),
    "mistral-small": Form(MISTRAL_SMALL, first_part=True),
    "gemma": Form(GEMMA),
    "gemma3": Form(GEMMA3, first_part=True),
    "phi3": Form(PHI3),
    "zephyr": Form(ZEPHYR),
    "deepseek": Form(DEEPSEEK, arguments="text", calls=True),
    "command-r": Form(COMMAND_R),
    "granite": Form(GRANITE, calls=True),
    "glm4": Form(GLM4),
    "vicuna": Form(VICUNA),
    "alpaca": Form(ALPACA),
    "falcon": Form(FALCON),
    "harmony": Form(HARMONY, calls=True, developer=True),
    "vision": Form(VISION, parts=True),
    "smolvlm": Form(SMOLVLM, parts=True),
    "exaone": Form(EXAONE),
    "olmo2": Form(OLMO2),
}
