"""Messages to a prompt: a model's chat template in a sandbox (`engine.template_sandbox`), fed as templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from .template_sandbox import Sandbox, TemplateError

__all__ = ["ChatTemplate", "TemplateError"]

Message = Mapping[str, Any]
RESERVED = frozenset({"messages", "bos_token", "eos_token"})
CUT_MARK = "\ue0c7cut\ue0c7 "
"""Marks the end of an unfinished message; the space shows whether the template trims contents."""


class ChatTemplate:
    """One compiled template. Immutable: `render` may be called from several threads."""

    def __init__(
        self,
        source: str,
        bos_token: str | None,
        eos_token: str | None,
        *,
        tool_use: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_use`: the source for conversations with tools, of models that have one of its own.

        `now` is the clock behind the template function `strftime_now`. Raises `TemplateError` for bad syntax.
        """
        self._with_tools = ChatTemplate(tool_use, bos_token, eos_token, now=now) if tool_use else None
        try:
            self._template = Sandbox(now).compile_bounded(source)
        except jinja2.TemplateSyntaxError as e:
            raise TemplateError(f"the chat template is not valid Jinja (line {e.lineno}): {e.message}") from e
        self.source = f"{source}\n{tool_use}" if tool_use else source
        """What all of it was made of, to look for words in."""
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        takes_text = self._shows("probe")
        self._takes_parts = self._shows([_text_part("probe")])
        self._needs_parts = self._takes_parts and not takes_text

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text, special tokens written out: encode it with `add_bos=False`.

        A message's content is text or a list of `{"type": "text", "text": …}` parts; parts are joined by newlines
        unless the template reads parts itself. `continue_final_message` leaves the last message open, to be
        completed, and excludes `add_generation_prompt`. `kwargs` are further variables of the template.
        Raises `TemplateError` with the template's words, or naming the message at fault.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        if reserved := RESERVED & kwargs.keys():
            raise TemplateError(f"{', '.join(sorted(reserved))} cannot be set as a template variable")
        if not messages:
            raise TemplateError("messages is empty: at least one message is needed")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        prepared = [self._prepare(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if continue_final_message:
            prepared[-1] = _marked(prepared[-1])
        text = self._run(prepared, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        return _cut(text) if continue_final_message else text

    def _run(self, messages: Sequence[Message], /, **variables: Any) -> str:
        try:
            return self._template.render(
                {**self._tokens, "documents": None, **variables, "messages": messages}
            )
        except TemplateError:
            raise
        except jinja2.TemplateError as e:
            raise TemplateError(f"the chat template failed: {e.message}") from e
        except Exception as e:  # foreign code on foreign data: anything may come
            raise TemplateError(f"the chat template failed: {type(e).__name__}: {e}") from e

    def _shows(self, content: object) -> bool:
        """Whether a message's content of this form reaches the prompt as text."""
        try:
            text = self._run([{"role": "user", "content": content}], tools=None, add_generation_prompt=False)
        except TemplateError:
            return False
        return "probe" in text and "'type'" not in text and '"type"' not in text

    def _prepare(self, message: Message, where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"{where} must be an object with a role and a content")
        prepared = dict(message)
        content = prepared.get("content")
        if isinstance(content, (list, tuple)):
            texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
            prepared["content"] = [_text_part(t) for t in texts] if self._takes_parts else "\n".join(texts)
        elif isinstance(content, str):
            prepared["content"] = [_text_part(content)] if self._needs_parts else content
        elif content is not None:
            raise TemplateError(f"{where}.content must be text or a list of text parts")
        if calls := prepared.get("tool_calls"):
            if not isinstance(calls, (list, tuple)):
                raise TemplateError(f"{where}.tool_calls must be a list")
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return prepared


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _part_text(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text":
        raise TemplateError(f"{where}: parts of type {kind!r} are not supported, only 'text' is")
    if not isinstance(text, str):
        raise TemplateError(f"{where}: a text part needs a text")
    return text


def _with_parsed_arguments(call: Any) -> Any:
    """API messages carry a call's arguments as JSON text; templates write them out as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + CUT_MARK}
    if content:
        return {**message, "content": [*content[:-1], _text_part(content[-1]["text"] + CUT_MARK)]}
    raise TemplateError("continue_final_message needs a last message with text")


def _cut(text: str) -> str:
    """What comes before the mark; without the white space there if the template trims contents."""
    start = text.rfind(CUT_MARK.strip())
    if start < 0:
        raise TemplateError(
            "continue_final_message: the chat template does not write the last message's text"
        )
    return text[:start] if text.startswith(CUT_MARK, start) else text[:start].rstrip()
