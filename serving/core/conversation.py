"""A conversation becomes a prompt, and it is settled how its answers are read. The same for every protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from ...engine.chat_template import ChatTemplate
from ...engine.request import SamplingParams
from ..http.auth import namespace_of, priority_of
from ..http.errors import bad_request
from ..openai.bodies import Waiting, prefetch_policy
from ..parsers import reasoning
from ..parsers.choose import CallStyle
from .answer_form import AnswerForm
from .answer_grammar import AnswerGrammar
from .generation import Call
from .keys import SERVICE
from .service import Service
from .tool_fields import AUTO, ToolChoice

_TAKEN = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables that a conversation has fields for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template is given, in its terms: messages with plain contents, tools in OpenAI's chat form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: ToolChoice = AUTO
    parallel: bool = True
    """Whether an answer may have more calls than one; further ones are left out."""
    form: AnswerForm | None = None
    """What the answer must match, apart from calls and reasoning."""
    separate_reasoning: bool = True
    variables: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    keep: int | None = None
    """The prompt's last so many tokens are enough, see `Service.keep_last`."""
    parameters: str = ".function.parameters"
    """Where the body's tools have the schemas of their arguments, for error messages."""
    param: str = "messages"
    """Field of the body that the messages came from, for error messages."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation's token ids, how to read what follows them, and what that must match."""

    ids: list[int]
    style: CallStyle
    form: AnswerForm | None = None


def template_variables(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Further variables of a template, out of the body's own and how much the model is to reason."""
    variables: dict[str, Any] = {}
    if effort is not None:
        # What templates of models whose reasoning can only be turned off go by.
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return variables | (given or {})


def make_prompt(service: Service, conversation: Conversation) -> Prompt:
    """Renders and encodes a conversation, for workers. Raises `TemplateError` or `ApiError` 400."""
    if conversation.keep is None:
        # Every message is a token at least: what cannot fit need not be rendered.
        service.check_length(len(conversation.messages), conversation.param)
    text = render(service, conversation)
    # The template writes the begin-of-text token itself where the model wants one.
    ids = service.encode(text, add_bos=False, param=conversation.param, keep=conversation.keep)
    return prompt_of(service, conversation, ids, text)


def render(service: Service, conversation: Conversation) -> str:
    """The prompt's text. Raises `TemplateError` or `ApiError` 400."""
    template = service.engine.chat_template
    if template is None:
        message = "This model has no chat template: it takes prompts, as /v1/completions does, no messages."
        raise bad_request(message, conversation.param)
    if conversation.tools and conversation.choice.may_call:
        _check_can_call(service, template)
    if taken := sorted(_TAKEN & conversation.variables.keys()):
        message = f"chat_template_kwargs: {taken[0]} is a field of the body."
        raise bad_request(message, "chat_template_kwargs")
    try:
        return template.render(
            conversation.messages,
            tools=conversation.tools or None,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.variables,
        )
    except RecursionError:
        raise bad_request(f"{conversation.param} are nested too deeply.", conversation.param) from None


def prompt_of(service: Service, conversation: Conversation, ids: list[int], text: str) -> Prompt:
    """The prompt with these ids and this text, or this end of it. Raises `ApiError` 400 for what cannot be enforced."""
    style = service.output_style
    if conversation.continue_final_message:
        message = conversation.messages[-1]["content"]
        in_reasoning = reasoning.stays_open(message)
        may_reason = style.think and not message.strip()
    else:
        in_reasoning = reasoning.ends_open(text)
        may_reason = style.think and not reasoning.ends_closed(text)
    callable_tools = conversation.tools if conversation.choice.may_call else []
    call_style = CallStyle(
        think=style.think and conversation.separate_reasoning,
        tools=style.tools if callable_tools else None,
        in_reasoning=in_reasoning,
        names=frozenset(tool["function"]["name"] for tool in conversation.tools),
        parallel=conversation.parallel and not conversation.choice.single,
    )
    grammar = AnswerGrammar(
        style.tools if callable_tools else None,
        conversation.tools,
        conversation.choice,
        parallel=call_style.parallel,
        reasoning="inside" if style.think and in_reasoning else "may" if may_reason else "none",
        special_ids=service.engine.tokenizer.special_ids,
        parameters=conversation.parameters,
    )
    return Prompt(ids, call_style, grammar.form(conversation.form))


class Asked(Waiting, Protocol):
    """What the body of a conversation may ask beside it."""

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...


def make_call(
    request: web.Request,
    body: Asked,
    prompt: Prompt,
    params: SamplingParams,
    *,
    prefix: str,
    param: str,
    started: float,
) -> Call:
    """The call whose answers continue a prompt; keywords as of `Call`."""
    # The tags that the answers' parsers look for must come through, special tokens or not.
    params.shown_special_ids = request.app[SERVICE].engine.tokenizer.special_ids(prompt.style.tags)
    return Call(
        prefix=prefix,
        prompts=[prompt.ids],
        params=params,
        form=prompt.form,
        namespace=namespace_of(request, body.cache_salt),
        prefetch=prefetch_policy(body),
        priority=priority_of(request, body.priority),
        param=param,
        started=started,
    )


def _check_can_call(service: Service, template: ChatTemplate) -> None:
    if service.output_style.tools is None:
        problem = "how this model writes tool calls is not known, see --tool-call-parser"
    elif "tools" not in template.source:
        problem = "this model's chat template has no place for them"
    else:
        return
    raise bad_request(f"tools are not supported: {problem}.", "tools", "unsupported_parameter")
