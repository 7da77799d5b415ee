"""A tokenizer, chat templates like those of known models, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from weft.data.tokenizer_training import train_tokenizer

SPECIAL = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
]

LLAMA = """\
{{- bos_token }}
{%- if tools is not none and tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
    {{- 'Tools: ' + (tools | tojson) + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson(indent=1) }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(turn='user') %}
{%- for message in messages %}
    {%- if message.role != ns.turn %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
        {%- set ns.turn = 'assistant' %}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
        {%- set ns.turn = 'user' %}
    {%- endif %}
{%- endfor %}
"""

MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {% generation %}
        {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The text of a turn depends on whether another turn follows.
REASONING = """\
{%- for message in messages %}
    {%- set think = '<think>' + message.reasoning_content + '</think>'
        if message.reasoning_content and loop.last else '' %}
    {{- '<|im_start|>' + message.role + '\\n' + think + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TEMPLATES = {"llama": LLAMA, "chatml": CHATML, "mistral": MISTRAL, "marked": MARKED}


def message(role: str, content: Any, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


TURNS = [
    message("user", "What is 2 + 2?"),
    message("assistant", "  It is 4.\n\n  "),
    message("user", "And in Zürich? 你好 🙂"),
    message("assistant", "There it is 4, too.\nReally\t 你好 🙂"),
]


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with all special tokens, and Llama's BOS rule."""
    tokenizer = train_tokenizer(["it is what it is, and there it was too " * 20], 340)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
            ),
        ]
    )
    return tokenizer


def write_tokenizer(directory: Path, template: str, **config: Any) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with a template."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
        "eos_token": "</s>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | config), "utf-8")
    return directory / "tokenizer.json"


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path
