"""Owns the chat template of demo checkpoints: ChatML with thinking and tool calls.

System and tools share one block. Thinking is kept only after the last question, as Qwen's templates do, so the end of a
prompt is not a prefix of the next turn's prompt.
"""

CHAT_TEMPLATE = r"""
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if part.type is defined and part.type != 'text' -%}
                {{- raise_exception('this model reads text only, found content of type ' ~ part.type) -}}
            {%- endif -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- elif content is not none and content is defined -%}
        {{- raise_exception('content must be a string or a list of parts') -}}
    {%- endif -%}
{%- endmacro -%}
{%- set turn = namespace(last_query=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set turn.last_query = loop.index0 -%}
    {%- elif message.role not in ('system', 'developer', 'assistant', 'tool') -%}
        {{- raise_exception('unexpected role: ' ~ message.role) -}}
    {%- elif message.role in ('system', 'developer') and not loop.first -%}
        {{- raise_exception('a system message must be the first message') -}}
    {%- endif -%}
{%- endfor -%}
{%- set has_system = messages and messages[0].role in ('system', 'developer') -%}
{%- if has_system or tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if has_system -%}
        {{- text_of(messages[0].content) -}}
        {%- if tools -%}{{- '\n\n' -}}{%- endif -%}
    {%- endif -%}
    {%- if tools -%}
        {{- '# Tools\n\nFunctions you may call, one JSON schema per line:\n<tools>' -}}
        {%- for tool in tools -%}{{- '\n' ~ (tool | tojson) -}}{%- endfor -%}
        {{- '\n</tools>\n\nTo call one, answer with its name and arguments as JSON inside tags:\n' -}}
        {{- '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<|im_start|>user\n' ~ text_of(message.content) ~ '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set answer = text_of(message.content) -%}
        {%- set thinking = message.reasoning_content -%}
        {%- if thinking is not string and '</think>' in answer -%}
            {%- set thinking = answer.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
        {%- endif -%}
        {%- set answer = answer.split('</think>')[-1].lstrip('\n') if '</think>' in answer else answer -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if thinking is string and loop.index0 > turn.last_query -%}
            {{- '<think>\n' ~ thinking.strip('\n') ~ '\n</think>\n\n' -}}
        {%- endif -%}
        {{- answer -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function if call.function is defined else call -%}
            {%- if answer or not loop.first -%}{{- '\n' -}}{%- endif -%}
            {{- '<tool_call>\n{"name": ' ~ (call.name | tojson) ~ ', "arguments": ' -}}
            {{- (call.arguments if call.arguments is string else call.arguments | tojson) ~ '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\n<tool_response>\n' ~ text_of(message.content) ~ '\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
""".lstrip()
