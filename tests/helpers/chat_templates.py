"""Small chat templates in the style of model families that reason and call tools, for tests without a model file."""

from __future__ import annotations

HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Answer calls as <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and '</think>' in message.content %}
{{- message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% elif opens_thinking %}<think>
{% endif %}{% endif %}"""
"""Hermes and Qwen3: tool calls between tags, reasoning that `enable_thinking` turns off; with `opens_thinking` the prompt
itself opens the reasoning, as DeepSeek's and QwQ's templates do."""

LLAMA3_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Environment: ipython
Respond as {"name": function name, "parameters": dictionary of arguments}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'ipython' if message.role == 'tool' else message.role }}
{% if message.tool_calls %}
{%- for call in message.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Llama 3: a call is a bare object, results come from `ipython`."""
