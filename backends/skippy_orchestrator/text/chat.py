"""Chat messages to prompt text, by the model's own template in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from skippy_stage.errors import InvalidArgument, SkippyError


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A compiled chat template; raises SkippyError when the model's template is not one."""

    def __init__(self, template: str, bos_token: str, eos_token: str) -> None:
        # Templates are written for these two settings, and use these three helpers.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise SkippyError(f"chat template: {error}") from None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: list[Message], *, to_answer: bool = True) -> str:
        """The prompt's text, ready for the assistant's turn unless ``to_answer`` is False.

        Raises InvalidArgument when the template refuses.
        """
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=to_answer, **self._tokens)
        except Exception as error:  # a template can fail in any way on messages it wasn't written for
            raise InvalidArgument(
                "messages", _roles(messages), f"what the chat template takes: {error}"
            ) from None


def parse_messages(text: str) -> list[Message]:
    """Read the JSON of ``messages``; raises InvalidArgument naming the place that is wrong."""
    try:
        messages = msgspec.json.decode(text, type=list[Message])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgument(
            "messages", text, f'JSON like [{{"role": "user", "content": "..."}}]: {error}'
        ) from None
    if not messages:
        raise InvalidArgument("messages", text, "at least one message")
    return messages


def _roles(messages: list[Message]) -> str:
    return ", ".join(message.role for message in messages)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
