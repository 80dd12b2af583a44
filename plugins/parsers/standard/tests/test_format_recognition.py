"""A model's template says in which format it writes: for each family exactly one format fits, or none."""

from __future__ import annotations

import pytest
from dynamo_core import ModelText
from dynamo_plugin_parsers_standard import dynamo_register_reasoning_parsers, dynamo_register_tool_parsers
from dynamo_plugin_parsers_standard.format_markers import REASONING_SIGNS, TOOL_SIGNS, SignTable, recognize

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n{{ m.content }}<|eot_id|>{% endfor %}"
)
JSON_CALLS = (
    '<tools>{{ tools | tojson }}</tools> Answer in tags: <tool_call>\n{"name": …, "arguments": …}\n</tool_call>'
)
XML_CALLS = "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
SWITCH = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
PROSE = 'Answer in the format {"name": …, "parameters": dictionary of argument name and its value}.'
PYTHON = "Write [func_name1(params_name1=params_value1), func_name2(params)] and nothing else."
DEEPSEEK = "{{ bos_token }}<｜User｜>{{ m.content }}<｜Assistant｜>"
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
LAST_THOUGHT = "{{ m.content.split('</think>') | last }}"
GRANITE = "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>"
GLM = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
GLM_CALL = "<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>"

#: What a family's template is like, and the parsers that fit.
FAMILIES: dict[str, tuple[str, str | None, str | None]] = {
    "Qwen 2.5": (CHATML + JSON_CALLS, "hermes", None),
    "Qwen 3": (CHATML + JSON_CALLS + SWITCH, "hermes", "qwen3"),
    "Qwen 3 Thinking": (CHATML + JSON_CALLS + "<|im_start|>assistant\n<think>\n", "hermes", "qwen3"),
    "Qwen 3 Coder": (CHATML + XML_CALLS, "qwen3_coder", None),
    "Llama 3.1": (LLAMA3 + PROSE + "Environment: ipython<|python_tag|>", "llama3_json", None),
    "Llama 3.2, Python": (LLAMA3 + PYTHON, "pythonic", None),
    "Llama 4": (LLAMA3.replace("start_header_id", "header_start") + PYTHON, "llama4_pythonic", None),
    "Llama 4, JSON": (LLAMA3.replace("start_header_id", "header_start") + PROSE, "llama3_json", None),
    "Mistral v3": ("[INST] {{ m.content }}[/INST][TOOL_CALLS] [{{ calls }}]", "mistral", None),
    "Mistral v11": ("[SYSTEM_PROMPT][INST][TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments }}", "mistral", None),
    "Magistral": ("[INST][TOOL_CALLS]{{ c.name }}[ARGS]{{ a }}First think: [THINK]…[/THINK]", "mistral", "mistral"),
    "DeepSeek V3": (DEEPSEEK + DEEPSEEK_CALL + "function<｜tool▁sep｜>{{ n }}\n```json\n", "deepseek_v3", None),
    "DeepSeek R1": (
        DEEPSEEK + LAST_THOUGHT + DEEPSEEK_CALL + "function<｜tool▁sep｜>{{ n }}\n```json\n<think>\n",
        "deepseek_v3",
        "deepseek_r1",
    ),
    "DeepSeek V3.1": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        + DEEPSEEK
        + LAST_THOUGHT
        + DEEPSEEK_CALL
        + "{{ n }}<｜tool▁sep｜>{{ a }}",
        "deepseek_v31",
        "deepseek_v31",
    ),
    "DeepSeek V3.2": (
        "{% if thinking is defined %}<think>{% else %}</think>{% endif %}"
        + DEEPSEEK
        + "<｜DSML｜function_calls>\n<｜DSML｜invoke name=",
        "deepseek_v32",
        "deepseek_v31",
    ),
    "GLM 4.5": (GLM + GLM_CALL + "\n<arg_value>{{ v }}</arg_value>{% endfor %}<think></think>", "glm45", "glm45"),
    "GLM 4.7": (GLM + GLM_CALL + "<arg_value>{{ v }}</arg_value>{% endfor %}<think>", "glm47", "glm45"),
    "Kimi K2": ("<|im_user|>user<|im_middle|>{{ c }}<|tool_calls_section_begin|>", "kimi_k2", None),
    "Kimi K2 Thinking": ("<|im_middle|><think></think><|tool_calls_section_begin|>", "kimi_k2", "kimi_k2"),
    "Kimi VL Thinking": ("<|im_assistant|>assistant<|im_middle|>{{ c.split('◁/think▷') }}◁think▷", None, "kimi_k2"),
    "MiniMax M2": (
        ']~b]ai\n<minimax:tool_call>\n<invoke name="{{ n }}">\n</minimax:tool_call><think>\n',
        "minimax_m2",
        "minimax_m2",
    ),
    "gpt-oss": (
        "<|start|>assistant<|channel|>analysis<|message|>{{ t }}<|end|> to=functions.f<|call|>",
        "gpt_oss",
        "gpt_oss",
    ),
    "FunctionGemma": ("<start_of_turn>model\n<start_function_call>call:{{ n }}{", "functiongemma", None),
    "Gemma 4": ("<|turn>model\n<|channel>thought\n<channel|><|tool_call>call:{{ n }}<tool_call|>", "gemma4", "gemma4"),
    "Gemma 2": ("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>", None, None),
    "Granite 3.1": (GRANITE + "respond with <|tool_call|> and a list of tools", "granite", None),
    "Granite 3.2": (GRANITE + "<|tool_call|> and write 'Here is my thought process:' first", "granite", "granite"),
    "Granite 3.3": (GRANITE + "<|tool_call|> <think></think> <response></response>", "granite", "granite"),
    "Granite 4": (GRANITE + JSON_CALLS, "hermes", None),
    "Granite 20B": ("<|function_call_library|>{{ tools }}<function_call> {{ c }}", "granite_20b_fc", None),
    "Phi-4 mini": ("<|{{ m.role }}|>{{ m.content }}<|tool|>{{ m.tools }}<|/tool|><|end|>", "phi4_mini", None),
    "Phi-4 reasoning": (CHATML + "Write <think> your thoughts </think> first.", None, "think"),
    "Nemotron Nano 2": ("<SPECIAL_10>System\n<TOOLCALL>[{{ c }}]</TOOLCALL><think>\n", "nemotron", "nemotron"),
    "Nemotron 3": (CHATML + XML_CALLS + "{% set truncate_history_thinking = true %}<think>", "qwen3_coder", "nemotron"),
    "OLMo 3": (CHATML + "You are Olmo. <functions></functions><function_calls></function_calls>", "olmo3", None),
    "OLMo 3 Think": (CHATML + "You are Olmo.<|im_start|>assistant\n<think>", None, "olmo3"),
    "Seed-OSS": ("<seed:tool_call>\n<function=f>\n<parameter=a><seed:think>", "seed_oss", "seed_oss"),
    "Gemma 3": ("<start_of_turn>model\nCall functions in ```tool_code\n```", "tool_code", None),
    "Llama 4, by its token": ("<|header_start|>assistant<|header_end|><|python_start|>", "llama4_pythonic", None),
    "ChatML and nothing else": (CHATML, None, None),
    "no template": ("", None, None),
}


def fitting(table: SignTable, template: str) -> list[str]:
    model = ModelText(template, frozenset(), {}, {})
    return [name for name in table if recognize(table, name, model)]


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_one_format_of_calls_fits_a_family_or_none(family: str) -> None:
    template, tools, _ = FAMILIES[family]

    assert fitting(TOOL_SIGNS, template) == ([] if tools is None else [tools])


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_one_format_of_reasoning_fits_a_family_or_none(family: str) -> None:
    template, _, reasoning = FAMILIES[family]

    assert fitting(REASONING_SIGNS, template) == ([] if reasoning is None else [reasoning])


def test_every_format_with_signs_is_that_of_a_family() -> None:
    assert {tools for _, tools, _ in FAMILIES.values()} == {*TOOL_SIGNS, None}
    assert {reasoning for _, _, reasoning in FAMILIES.values()} == {*REASONING_SIGNS, None}


def test_every_parser_recognizes_the_markers_of_its_format() -> None:
    for template, tools, reasoning in FAMILIES.values():
        model = ModelText(template, frozenset(), {}, {})
        for cls in dynamo_register_tool_parsers():
            assert (cls.recognizes(model) is not None) == (tools == cls.NAME)
        for other in dynamo_register_reasoning_parsers():
            assert (other.recognizes(model) is not None) == (reasoning == other.NAME)

    [hermes] = [cls for cls in dynamo_register_tool_parsers() if cls.NAME == "hermes"]
    reason = hermes.recognizes(ModelText(CHATML + JSON_CALLS, frozenset(), {}, {}))
    assert reason == "its template has '<tool_call>' and '</tool_call>'"
