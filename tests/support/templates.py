"""Small chat templates that behave as published ones do, and conversations to render with them."""

# GLM-5.2: two efforts, every other word is the greatest; without reasoning there is none of them.
GLM_5_2 = """\
[gMASK]<sop>
{%- set effort = 'high' if reasoning_effort is defined and reasoning_effort == 'high' else 'max' -%}
{%- if enable_thinking is not defined or enable_thinking -%}<|system|>Effort: {{ effort | capitalize }}{%- endif -%}
{%- if tools -%}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{%- endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor -%}</tool_call>
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '<think>' if enable_thinking is not defined or enable_thinking else '<think></think>' }}
{%- endif -%}
"""

# GLM-5.3: three efforts, reasoning always.
GLM_5_3 = """\
{%- set effort = reasoning_effort if reasoning_effort in ['low', 'high'] else 'max' -%}
<|system|>Effort: {{ effort }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|><think>
"""

# gpt-oss: any effort is printed; tools are written as TypeScript; one call in a message, beside reasoning or a text.
GPT_OSS = """\
{%- macro kind(spec) -%}
{%- if spec.type == "array" -%}{{ kind(spec['items']) + "[]" }}
{%- elif spec.type == "string" and spec.enum -%}{{ '"' + spec.enum | join('" | "') + '"' }}
{%- elif spec.oneOf -%}{% for s in spec.oneOf %}{{ kind(s) }}{{ "// " + s.description if s.description }}{% endfor %}
{%- else -%}{{ spec.type or "any" }}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + strftime_now("%Y-%m-%d %H:%M:%S.%f") -}}
{{- " Reasoning: " + (reasoning_effort if reasoning_effort is defined else "medium") + "<|end|>" -}}
{%- if tools -%}{{ "<|start|>developer<|message|>" }}
{%- for tool in tools -%}
{{- "// " + tool.function.description + "\\ntype " + tool.function.name + " = (_: {" -}}
{%- for name, spec in tool.function.parameters.properties.items() -%}
{{- name + ": " + kind(spec) -}}
{%- if spec.default is defined -%}
{{- ", // default: " + spec.default if spec.enum or spec.oneOf else ", // default: " + spec.default | tojson -}}
{%- endif -%}
{%- endfor -%}
{{- "}) => any;" -}}
{%- endfor -%}{{ "<|end|>" }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == "assistant" and m.tool_calls -%}
{%- if m.content and m.thinking -%}{{ raise_exception("both content and thinking") }}{%- endif -%}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + (m.content or m.thinking or "") + "<|end|>" -}}
{{- "<|start|>assistant to=functions." + m.tool_calls[0].function.name + "<|channel|>commentary json<|message|>" -}}
{{- m.tool_calls[0].function.arguments | tojson + "<|call|>" -}}
{%- else -%}{{ "<|start|>" + m.role + "<|channel|>final<|message|>" + m.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{{- "<|start|>assistant" if add_generation_prompt -}}
"""

# DeepSeek R1 and V3 of January 2025: arguments are joined as text, and only calls without any content are written.
DEEPSEEK_R1 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m['role'] == 'assistant' and m['content'] is none -%}
{%- for call in m['tool_calls'] -%}
{{- '<call>' + call['type'] + '<sep>' + call['function']['name'] + '\\n' + call['function']['arguments'] + '</call>' -}}
{%- endfor -%}
{%- elif m['content'] is not none -%}{{ '<' + m['role'] + '>' + m['content'] }}{%- endif -%}
{%- endfor -%}
{{- '<Assistant><think>\\n' if add_generation_prompt -}}
"""

# DeepSeek-V3.1: the switch is called thinking and is off by default.
DEEPSEEK_V3_1 = """\
{%- if thinking is not defined -%}{%- set thinking = false -%}{%- endif -%}
{%- for m in messages -%}
{{- '<' + m['role'] + '>' + m['content'] -}}
{%- for call in m['tool_calls'] or [] -%}
{{- '<call>' + call['function']['name'] + '<sep>' + call['function']['arguments'] + '</call>' -}}
{%- endfor -%}
{%- endfor -%}
{{- '<Assistant>' + ('<think>' if thinking else '</think>') -}}
"""

# DeepSeek-V4: two efforts beside a default that has no name.
DEEPSEEK_V4 = """\
{%- if thinking is not defined and enable_thinking is defined -%}{%- set thinking = enable_thinking -%}{%- endif -%}
{%- if thinking and reasoning_effort == 'high' -%}be thorough{%- elif thinking and reasoning_effort == 'max' -%}more
{%- endif -%}
{%- for m in messages -%}{{ '<' + m.role + '>' + m.content }}{%- endfor -%}
{{- '<think>' if thinking else '</think>' -}}
"""

# Qwen3: the switch is on by default; arguments may be an object or a text.
QWEN_3 = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{%- endfor -%}
<|im_start|>assistant
{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false }}
"""

# Qwen3.8: other efforts fail; high is another word for the greatest.
QWEN_3_8 = """\
{%- if enable_thinking is undefined or enable_thinking -%}
{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort != 'high' else 'xhigh' -%}
{%- if effort not in ['low', 'medium', 'xhigh'] -%}{{ raise_exception('no such effort') }}{%- endif -%}
{{ effort }}
{%- endif -%}
{%- for m in messages -%}{{ m.content }}{%- endfor -%}
{{ '<think>' if enable_thinking is undefined or enable_thinking else '<think></think>' }}
"""

# Hy3: the effort turns reasoning off, as by default.
HY_3 = """\
{%- if reasoning_effort is not defined -%}{%- set reasoning_effort = 'no_think' -%}
{%- elif reasoning_effort not in ['no_think', 'low', 'high'] -%}{{ raise_exception('effort') }}{%- endif -%}
{%- for m in messages -%}{{ m.content }}{%- endfor -%}
{{ reasoning_effort + ('<think></think>' if reasoning_effort == 'no_think' else '<think>') }}
"""

# Mixtral: no tools, no reasoning.
MIXTRAL = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{{- '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token -}}
{%- endfor -%}
"""

# Prints what Python makes of the arguments.
PYTHON_PRINTER = """\
{%- for m in messages -%}{{ m.content }}
{%- for call in m.tool_calls or [] -%}{{ call.function.name }} {{ call.function.arguments }}{%- endfor -%}
{%- endfor -%}
"""


def with_calls(call: str) -> str:
    """A template that shows tools, and writes calls in a form of its own: text of a template, `call` is the call."""
    start = """\
{%- for tool in tools or [] -%}<|system|>{{ tool | tojson }}{%- endfor -%}
{%- for m in messages -%}
<|{{ m.role }}|>{{ m.reasoning_content or '' }}{{ m.content or '' }}
{%- for call in (m.tool_calls or []) | map(attribute='function') %}
"""
    end = """
{%- endfor -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}
"""
    return start + call + end


# Qwen3 with tools, and its example of a call in the instructions.
HERMES = '{{ \'<tool_call>{"name": <name>, "arguments": <object>}</tool_call>\' if tools }}' + with_calls(
    '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
)
# GLM-4.5: each argument on its own line.
GLM_4_5 = with_calls("""\
{{- '<tool_call>' + call.name }}
{% for key, value in call.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}
</tool_call>""")
# Forms of calls that no parser reads.
QWEN_3_CODER = with_calls("""\
{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments.items() %}
{{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}
{%- endfor -%}</function>
</tool_call>""")
HUNYUAN = with_calls("""\
{{- '<tool_calls>\\n<tool_call>' + call.name + '<tool_sep>' }}
{%- for key, value in call.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key><arg_value>' + value | string + '</arg_value>' }}
{%- endfor -%}</tool_call></tool_calls>""")
LLAMA_3 = with_calls('<|python_tag|>{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eom_id|>')
MISTRAL = with_calls('[TOOL_CALLS][{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]</s>')
KIMI_K2 = with_calls(
    "<|tool_call_begin|>functions.{{ call.name }}:0<|tool_call_argument_begin|>"
    "{{ call.arguments | tojson }}<|tool_call_end|>"
)
DEEPSEEK_TOOLS = with_calls("<call>function<sep>{{ call.name }}\n{{ call.arguments | tojson }}</call>")
JSON_LIST = with_calls(
    '<tool_call>[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]</tool_call>'
)
# The starts of their calls.
unread_forms = {
    "QWEN_3_CODER": "<tool_call>\n<function=probe_0>",
    "HUNYUAN": "<tool_calls>\n<tool_call>probe_0<tool_sep>",
    "LLAMA_3": '<|python_tag|>{"name": "probe_0"',
    "MISTRAL": '[TOOL_CALLS][{"name": "probe_0"',
    "KIMI_K2": "<|tool_call_begin|>functions.probe_0:0",
    "DEEPSEEK_TOOLS": "<call>function<sep>probe_0",
    "JSON_LIST": '<tool_call>[{"name": "probe_0"',
}
