"""Chat templates in the manner of well-known models. Each marks what the assistant writes after its header."""

import re

_SYSTEM_TEXT = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are Qwen.{% endif %}"
_CALLS = (
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}{% endfor %}"
)
_REFUSE_OTHER_ORDERS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)

MARKED = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content or '' }}" + _CALLS + "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}"
        "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "default system text and tools": (
        "{{ '<|im_start|>system\n' }}"
        + _SYSTEM_TEXT
        + "{% if tools %}{{ '\n# Tools\n' }}{{ tools | tojson }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}" + _CALLS + "{{ '<|im_end|>\n' }}"
        "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "reasoning after the last question only": (
        "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
        "{% set ns = namespace(last=messages | length) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.index0 > ns.last and m.reasoning_content %}"
        "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}"
        + _CALLS
        + "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama 3": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ (m.content or '') | trim }}" + _CALLS + "{{ '<|eot_id|>' }}{% endgeneration %}{% else %}"
        "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "tools in the first question": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}" + _CALLS + "{{ '<|eot_id|>' }}"
        "{% endgeneration %}{% else %}{% if loop.first and tools %}{{ tools | tojson }}{% endif %}"
        "{{ m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "llama 2": (
        _REFUSE_OTHER_ORDERS + "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% else %}{% generation %}"
        "{{ ' ' + m.content + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}"
        "{% generation %}{{ (m.content or '') | trim }}" + _CALLS + "{{ '<end_of_turn>\n' }}{% endgeneration %}"
        "{% else %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content or '' }}" + _CALLS + "{{ eos_token + '\n' }}{% endgeneration %}{% else %}"
        "{{ m.content + eos_token + '\n' }}{% endif %}{% if loop.last and add_generation_prompt %}"
        "{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content or '' }}" + _CALLS + "{{ '<|end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'assistant' %}"
        "{{ '<|Assistant|>' }}{% generation %}{{ m.content or '' }}" + _CALLS + "{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ '<|User|>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
    ),
    "alpaca": (
        "{{ 'Below is an instruction.\n\n' }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '### Response:\n' }}{% generation %}{{ m.content or '' }}" + _CALLS + "{{ eos_token + '\n\n' }}"
        "{% endgeneration %}{% else %}{{ '### Instruction:\n' + m.content + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
    ),
    "separators between messages": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content or '' }}" + _CALLS + "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}"
    ),
    "without a prompt": (
        "{% if tools %}{{ tools | tojson + '\n' }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ 'assistant: ' + (m.content or '') }}" + _CALLS + "{{ '\n' }}{% endgeneration %}{% else %}"
        "{{ m.role + ': ' + m.content + '\n' }}{% endif %}{% endfor %}"
    ),
    "reasoning of the last message only": (
        "{% if tools %}{{ 'Tools: <|assistant|>\n' }}{{ tools | tojson + '\n' }}{% endif %}{% for m in messages %}"
        "{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.last and not loop.first %}{{ '<think></think>' }}{% endif %}{{ m.content or '' }}"
        + _CALLS
        + "{{ '<|end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}


def without_marks(template: str) -> str:
    """The same template without `{% generation %}` marks."""
    return re.sub(r"{% (end)?generation %}", "", template)
