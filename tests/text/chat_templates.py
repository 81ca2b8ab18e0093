"""Chat templates that write tools, calls and results as the published ones of four families do,
without what these tests do not need."""

from __future__ import annotations

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# As published it names no tools: deployments that want them bring a template that does.
DEEPSEEK_V3 = """\
{{- bos_token }}
{%- for message in messages if message['role'] == 'system' %}{{- message['content'] }}{%- endfor %}
{%- set ns = namespace(is_tool=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {%- for tool in message['tool_calls'] %}
            {%- if loop.first %}
                {{- '<｜Assistant｜>' }}
                {%- if message['content'] is not none %}{{- message['content'] }}{%- endif %}
                {{- '<｜tool▁calls▁begin｜>' }}
            {%- else %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.is_tool %}
            {{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
            {%- set ns.is_tool = false %}
        {%- else %}
            {{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '\\n' if ns.is_tool else '<｜tool▁outputs▁begin｜>' }}
        {%- set ns.is_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}
    {{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}
    {{- '<｜Assistant｜>' }}
{%- endif %}"""

DEEPSEEK_V31 = """\
{%- if thinking is not defined %}{%- set thinking = false %}{%- endif %}
{{- bos_token }}
{%- for message in messages if message['role'] == 'system' %}{{- message['content'] }}{%- endfor %}
{%- set ns = namespace(is_tool=false, is_last_user=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {%- set ns.is_last_user = true %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {%- if ns.is_last_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.is_last_user = false %}
        {%- for tool in message['tool_calls'] %}
            {%- if loop.first %}
                {%- if message['content'] is not none %}{{- message['content'] }}{%- endif %}
                {{- '<｜tool▁calls▁begin｜>' }}
            {%- endif %}
            {{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.is_last_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.is_last_user = false %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>', 1)[1] %}
        {%- endif %}
        {{- content + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {%- set ns.is_last_user = false %}
        {%- set ns.is_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}"""

KIMI_K2 = """\
{%- macro calls(message) -%}
    <|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
        <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
        {%- if call['function']['arguments'] is string -%}
            {{ call['function']['arguments'] }}
        {%- else -%}
            {{ call['function']['arguments'] | tojson }}
        {%- endif -%}
        <|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
{%- endmacro -%}
{%- if tools -%}
    <|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
    {%- set role = message['role'] -%}
    {%- if role == 'user' or role == 'assistant' -%}
        {{ '<|im_' + role + '|>' + role + '<|im_middle|>' }}
    {%- else -%}
        {{ '<|im_system|>' + role + '<|im_middle|>' }}
    {%- endif -%}
    {%- if role == 'tool' -%}
        {{ '## Return of ' + message['tool_call_id'] + '\\n' + message['content'] }}
    {%- else -%}
        {%- if message['content'] is string -%}
            {{ message['content'] }}
        {%- else -%}
            {%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}
        {%- endif -%}
        {%- if message.get('tool_calls') -%}{{ calls(message) }}{%- endif -%}
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|im_assistant|>assistant<|im_middle|>
{%- endif -%}"""

TEMPLATES = {
    "hermes": QWEN3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
}
