"""Functions that a model may call: told to it by its template, held to their schemas by a grammar, read back.

A call is ``<tool_call>`` JSON ``</tool_call>``, as many open models were taught (the Hermes format); the grammar makes
any other model follow it too.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from flashspec.core import Grammar
from flashspec.server.protocol import ApiError, ChatRequest, NamedTool, Tool, shown

BEGIN, END = "<tool_call>\n", "\n</tool_call>"
MARK = BEGIN.strip()


def chosen(request: ChatRequest) -> list[Tool]:
    """The tools that may be called.

    Raises:
        ApiError: a choice without tools, or of one that is not there.
    """
    tools, choice = request.tools or [], request.tool_choice
    if choice in (None, "none", "auto") and not tools:
        return []
    if not tools:
        text = "tool_choice needs tools; add some, or leave it out"
        raise ApiError(400, text, param="tool_choice", code="invalid_value")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            text = f"tool_choice names {shown(choice.function.name)}, which is not among the tools; add it to them"
            raise ApiError(400, text, param="tool_choice", code="invalid_value")
    return tools


def grammar(request: ChatRequest, tools: Seq[Tool]) -> Grammar:
    """Free text with calls in it, or nothing but calls where one is required."""
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    parameters = {
        str(number): _moved(tool.function.parameters or {"type": "object"}, f"#/$defs/{number}")
        for number, tool in enumerate(tools)
    }
    whitespace = {"whitespace_pattern": r"[ \n]{0,4}"}
    body = json.dumps({"anyOf": schemas, "$defs": parameters, "x-guidance": whitespace})
    if request.tool_choice in (None, "auto"):
        many = "?" if request.parallel_tool_calls is False else "*"
        start = f"start: called{many} tail\ncalled: head body {json.dumps(END)}\n"
        start += f"head[lazy]: TEXT {json.dumps(BEGIN)}\ntail: TEXT\nTEXT: /(.|\\n)*/\n"
    else:
        # one call, unless more are asked for: small models do not stop by themselves
        more = ' ("\\n" call)*' if request.parallel_tool_calls and request.tool_choice == "required" else ""
        start = f"start: call{more}\n"
        start += f"call: {json.dumps(BEGIN)} body {json.dumps(END)}\n"
    return Grammar("lark", f"%llguidance {{}}\n{start}body: %json {body}\n")


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to its own root still hold where it has become a part of another."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(part, to) for key, part in schema.items() if key not in ("$schema", "$id")}
    if isinstance(ref := moved.get("$ref"), str) and ref.startswith("#"):
        moved["$ref"] = to + ref[1:]
    return moved


def written(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'{BEGIN}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{END}'


def explained(tools: Seq[Tool]) -> str:
    """A system message for models whose template does not tell them of tools."""
    listed = "\n".join(json.dumps(tool.function.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions:\n{listed}\n"
        f'To call one, write {MARK} on a line, then {{"name": ..., "arguments": {{...}}}}, then {END.strip()}.'
    )


@dataclass(slots=True)
class Calls:
    """Takes calls out of a text that comes in pieces."""

    names: frozenset[str]  # of the tools that may be called
    found: list[dict[str, Any]] = field(default_factory=list)
    _held: str = ""
    _is_behind_call: bool = False  # whose line end is no text

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The text that is no part of a call, as far as that is certain, and the calls that are complete."""
        self._held += text
        shown, calls = "", []
        self._skip_line_end()
        while (at := self._held.find(MARK)) >= 0 and (end := self._held.find(END, at)) >= 0:
            shown += self._held[:at]
            if (call := self._call(self._held[at + len(MARK) : end])) is not None:
                calls.append(call)
            else:
                end = at + len(MARK) - len(END)  # what is behind the mark may be a call yet
                shown += MARK
            self._held = self._held[end + len(END) :]
            self._is_behind_call = call is not None
            self._skip_line_end()
        if at < 0 and not is_last:
            at = next((i for i in range(len(self._held)) if MARK.startswith(self._held[i:])), len(self._held))
        if is_last and at < 0:
            at = len(self._held)
        shown, self._held = shown + self._held[:at], self._held[at:]
        if is_last:  # a call that was cut short is shown as it is
            shown, self._held = shown + self._held, ""
        return shown, calls

    def _skip_line_end(self) -> None:
        if self._is_behind_call and self._held:
            self._held = self._held.removeprefix("\n")
            self._is_behind_call = False

    def _call(self, text: str) -> dict[str, Any] | None:
        """None for text that only looks like a call."""
        try:
            said = json.loads(text)
            name, arguments = said["name"], said["arguments"]
            if name not in self.names or not isinstance(arguments, dict):
                return None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        call = {
            "index": len(self.found),
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        self.found.append(call)
        return call
