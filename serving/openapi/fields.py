"""What the document says of the fields of bodies beyond their types: ranges as the engine checks them, and their use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...engine.validate import BIAS, MAX_BIAS_ENTRIES, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_STOPS, RANGES, ROLES

Schema = dict[str, Any]

USES = {
    "model": "Name of the served model; may be left away.",
    "messages": "The conversation so far.",
    "prompt": "A text, token ids, or a list of one of these kinds.",
    "max_tokens": "Most tokens to generate; the context length bounds it anyway.",
    "max_completion_tokens": "Newer name of max_tokens, which it overrides.",
    "temperature": "0 always takes the likeliest token.",
    "top_p": "Only the likeliest tokens that together have this probability.",
    "top_k": "Only so many of the likeliest tokens; 0 or -1 = all.",
    "min_p": "Only tokens with this share of the likeliest one's probability.",
    "n": "Answers per prompt.",
    "best_of": "So many are made, and the n best of them told.",
    "stop": "Texts that end the answer, and are not part of it.",
    "stop_token_ids": "Tokens that end the answer.",
    "include_stop_str_in_output": "Leave the text that ended the answer in it.",
    "seed": "Same seed, same answer.",
    "frequency_penalty": "Lowers tokens by how often they were generated.",
    "presence_penalty": "Lowers tokens that were generated.",
    "repetition_penalty": "Above 1, makes tokens of prompt and answer less likely.",
    "logit_bias": "Added to the logits, by token id.",
    "logprobs": "Tell log-probabilities: true in chats, the number of likeliest tokens in completions.",
    "top_logprobs": "Likeliest tokens told in each place; needs logprobs.",
    "prompt_logprobs": "Likeliest tokens told for each token of the prompt.",
    "response_format": "What the answer must be: text, any JSON object, JSON that fits a schema, or text with tagged parts.",
    "structured_outputs": "What the answer must match; one of its fields.",
    "guided_json": "The answer is JSON that fits this schema.",
    "guided_regex": "All of the answer matches this pattern.",
    "guided_choice": "The answer is one of these texts.",
    "guided_grammar": "The answer follows this grammar, in Lark or GBNF.",
    "json_schema": "The answer is JSON that fits this schema.",
    "regex": "All of the answer matches this pattern.",
    "ebnf": "The answer follows this grammar, in Lark or GBNF.",
    "structural_tag": "Text with tagged parts, as structures and triggers.",
    "choice": "The answer is one of these texts.",
    "grammar": "The answer follows this grammar, in Lark or GBNF.",
    "json_object": "The answer is a JSON object.",
    "json": "The answer is JSON that fits this schema.",
    "output_format": "JSON that the answer must fit.",
    "tools": "Functions that may be called.",
    "tool_choice": "Whether answers may call functions, must, or which.",
    "stream": "Answer by server-sent events as tokens come.",
    "stream_options": "Needs stream.",
    "min_tokens": "No end before so many tokens.",
    "ignore_eos": "Go on at end-of-text tokens.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "echo": "Begin with the prompt.",
    "cache_salt": "Only requests with the same salt share cached prefixes.",
    "prefetch_policy": "How long to wait for what the disk has: best_effort, wait_complete or timeout=N ms.",
    "priority": "A lower value comes earlier.",
    "return_token_ids": "Tell the token ids of prompt and answer.",
    "truncate_prompt_tokens": "Keep only so many of the prompt's last tokens.",
    "chat_template_kwargs": "Further variables of the chat template.",
    "add_generation_prompt": "Open an answer after the last message.",
    "continue_final_message": "Go on with the last message instead of answering it.",
}
"""What a field is for, by its name in whichever body it stands."""

ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "logprobs",
    "prompt_logprobs": "logprobs",
    "best_of": "n",
}
"""Fields that have the range of another one."""

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
SHAPES: dict[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
            },
            "required": ["role", "content"],
        },
    },
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,6}$"},
        "additionalProperties": {"type": "number", "minimum": BIAS.low, "maximum": BIAS.high},
        "maxProperties": MAX_BIAS_ENTRIES,
    },
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                "maxItems": MAX_STOPS,
            },
        ]
    },
    "stop_token_ids": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "maxItems": MAX_STOP_IDS,
    },
    "cache_salt": {"type": "string", "minLength": 1},
    "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "prefetch_policy": {"type": "string", "pattern": "^(best_effort|wait_complete|timeout=[0-9]{1,6}ms)$"},
}
"""Closer schemas of what types call an object, a list or a text, by the field's name."""
_RANGES = {rule.field: rule for rule in RANGES}
_RANGES |= {other: _RANGES[name] for other, name in ALIASES.items()}


def refine(body: Schema, model_name: str) -> None:
    """Adds ranges, shapes and uses to the schema of a body, and drops the fields that are only there to be refused.

    Those are the ones of no particular type.
    """
    properties: Schema = body.get("properties", {})
    for name, schema in list(properties.items()):
        if not schema.keys() - {"default"}:
            del properties[name]
            continue
        for branch in _branches(schema):
            _refine_branch(name, branch)
            if name == "model" and branch.get("type") == "string":
                branch["enum"] = [model_name]
        if name in USES:
            schema["description"] = USES[name]


def _branches(schema: Schema) -> Iterator[Schema]:
    yield from schema.get("anyOf", [schema])


def _refine_branch(name: str, branch: Schema) -> None:
    shape = SHAPES.get(name)
    if branch.get("items") == {}:
        # A list of anything: other protocols have fields of the same names.
        shape = None
    if shape is not None and branch.get("type") in _types(shape):
        branch.update(next(part for part in _branches(shape) if part["type"] == branch["type"]))
    rule = _RANGES.get(name)
    if rule is not None and branch.get("type") in ("integer", "number"):
        branch["exclusiveMinimum" if rule.above else "minimum"] = rule.low
        branch["maximum"] = rule.high


def _types(shape: Schema) -> list[str]:
    return [part["type"] for part in _branches(shape)]
