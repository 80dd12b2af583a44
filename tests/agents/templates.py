"""Chat templates in the manner of model families, written by us: they show tools, calls, and what tools returned.

Those of DeepSeek and Mistral are in the construction of the published ones: they add arguments to text, tell calls by a
content that is none, and refuse roles that do not take turns.
"""

from __future__ import annotations

from tests.templates.reference import family

#: A content is a text, or parts.
_TEXT = """\
{%- macro text(content) %}
{%- if content is string %}{{- content }}
{%- elif content %}{%- for part in content %}{{- part['text'] }}{%- endfor %}
{%- endif %}
{%- endmacro %}
"""
#: All functions of the tools, a line each.
_TOOLS = """{%- for tool in tools %}{{- (tool['function'] or tool) | tojson + '\\n' }}{%- endfor %}"""

_CHATML_ROLES = """\
{%- elif message['role'] == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message['content']) + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + text(message['content']) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

HERMES = (
    _TEXT
    + """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\nThe functions that may be called:\\n<tools>\\n' }}"""
    + _TOOLS
    + """
{{- '</tools>\\nA call is JSON:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message['reasoning_content'] %}
{{- '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' }}
{%- endif %}
{{- text(message['content']) }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>\\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
"""
    + _CHATML_ROLES
)

QWEN3_CODER = (
    _TEXT
    + """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>\\n' }}"""
    + _TOOLS
    + """
{{- '</tools>\\nCall a function so:\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n' }}
{{- '</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' + text(message['content']) }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>\\n<function=' + call['function']['name'] + '>\\n' }}
{%- for key, value in call['function']['arguments'].items() %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
"""
    + _CHATML_ROLES
)

DEEPSEEK_V31 = family("deepseek_v31")

GLM45 = (
    _TEXT
    + """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\\n# Tools\\n<tools>\\n' }}"""
    + _TOOLS
    + """
{{- '</tools>\\nA call:\\n<tool_call>{name}\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|assistant|>\\n<think>' + (message['reasoning_content'] or '') + '</think>\\n' + text(message['content']) }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>' + call['function']['name'] + '\\n' }}
{%- for key, value in call['function']['arguments'].items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) }}
{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif message['role'] == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + text(message['content']) + '\\n</tool_response>' }}
{%- else %}
{{- '<|' + message['role'] + '|>\\n' + text(message['content']) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}
"""
)

KIMI_K2 = (
    _TEXT
    + """\
{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' }}"""
    + _TOOLS
    + """
{{- '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|><think>' + (message['reasoning_content'] or '') + '</think>' }}
{{- text(message['content']) }}
{%- if message['tool_calls'] %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message['tool_calls'] %}
{{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' + (call['function']['arguments'] | tojson) }}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{%- elif message['role'] == 'tool' %}
{{- '<|im_system|>tool<|im_middle|>## Return of ' + message['tool_call_id'] + '\\n' + text(message['content']) }}
{%- elif message['role'] == 'user' %}
{{- '<|im_user|>user<|im_middle|>' + text(message['content']) }}
{%- else %}
{{- '<|im_system|>' + message['role'] + '<|im_middle|>' + text(message['content']) }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""
)

MINIMAX_M2 = (
    _TEXT
    + """\
{{- ']~!b[' }}
{%- if tools %}
{{- ']~b]system\\n# Tools\\n<tools>\\n' }}"""
    + _TOOLS
    + """
{{- '</tools>\\nA call:\\n<minimax:tool_call>\\n<invoke name="name">\\n<parameter name="key">value</parameter>\\n' }}
{{- '</invoke>\\n</minimax:tool_call>[e~[\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- ']~b]ai\\n' }}
{%- if message['reasoning_content'] %}
{{- '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' }}
{%- endif %}
{{- text(message['content']) }}
{%- if message['tool_calls'] %}
{{- '\\n<minimax:tool_call>\\n' }}
{%- for call in message['tool_calls'] %}
{{- '<invoke name="' + call['function']['name'] + '">\\n' }}
{%- for key, value in call['function']['arguments'].items() %}
{{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) + '</parameter>\\n' }}
{%- endfor %}
{{- '</invoke>\\n' }}
{%- endfor %}
{{- '</minimax:tool_call>' }}
{%- endif %}
{%- elif message['role'] == 'tool' %}
{{- ']~b]tool\\n<response>' + text(message['content']) + '</response>' }}
{%- else %}
{{- ']~b]' + message['role'] + '\\n' + text(message['content']) }}
{%- endif %}
{{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}
"""
)

GPT_OSS = (
    _TEXT
    + """\
{{- '<|start|>system<|message|>Reasoning: medium\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
{{- '<|start|>developer<|message|># Tools\\n## functions\\nnamespace functions {\\n' }}"""
    + _TOOLS
    + """
{{- '} // namespace functions<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{%- if message['tool_calls'] %}
{%- for call in message['tool_calls'] %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + call['function']['name'] }}
{{- ' <|constrain|>json<|message|>' + (call['function']['arguments'] | tojson) + '<|call|>' }}
{%- endfor %}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + text(message['content']) + '<|end|>' }}
{%- endif %}
{%- elif message['role'] == 'tool' %}
{{- '<|start|>functions.tool to=assistant<|channel|>commentary<|message|>' + text(message['content']) + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message['role'] + '<|message|>' + text(message['content']) + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
)

MISTRAL = family("mistral_v13")

LLAMA3_JSON = (
    _TEXT
    + """\
{{- '<|begin_of_text|>' }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\nA call has the form ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}.\\n' }}"""
    + _TOOLS
    + """
{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['tool_calls'] %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- for call in message['tool_calls'] %}
{{- '{"name": "' + call['function']['name'] + '", "parameters": ' + (call['function']['arguments'] | tojson) + '}' }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- elif message['role'] == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + text(message['content']) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + text(message['content']) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
)
