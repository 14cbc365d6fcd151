"""Settings of the data room: keys of conf/data/*.yaml."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from draftlab.settings.base import Settings


class DataSettings(Settings):
    """Which conversations to read and how to turn them into token rows.

    Attributes:
        kind: builtin (the shipped prompts, which have no answers), jsonl (own files) or hub.
        paths: files (.jsonl, .json, .parquet) or folders of them; for kind jsonl.
        hub_name: name of a data set on the hub; for kind hub.
        hub_subset: its configuration, or None for its only one.
        hub_split: its split.
        answers: given (those in the data are learned) or target (the target answers the prompts
            first, and its own answers are learned).
        messages_field: field that holds the chat, or None to look for the usual names.
        domain: domain of rows that name none themselves.
        max_tokens: longest row in tokens, 2 or more: one to read and one to learn; what lies beyond
            is cut and counted.
        learn: answers, or all (prompts as well, what many of them begin with once; chats with a
            turn of weight 0 are refused).
        turns: each (every answer is learned) or last (only the last answer of a chat).
        on_bad_line: fail (list every bad line and stop) or skip (list them and go on).
        validation_fraction: share of chats held out, chosen by their id; 0 for none.
        max_samples: read no more than this many chats, or None for all.
        template_options: further variables of the chat template, such as enable_thinking.
    """

    kind: Literal["builtin", "jsonl", "hub"]
    paths: tuple[str, ...]
    hub_name: str | None
    hub_subset: str | None
    hub_split: str
    answers: Literal["given", "target"]
    messages_field: str | None
    domain: str
    max_tokens: int = Field(ge=2)
    learn: Literal["answers", "all"]
    turns: Literal["each", "last"]
    on_bad_line: Literal["fail", "skip"]
    validation_fraction: float = Field(ge=0.0, lt=1.0)
    max_samples: PositiveInt | None
    template_options: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _wrap_one_path(cls, data: Any) -> Any:
        # data.paths=my.jsonl is what people type; a lone text is one path
        if isinstance(data, dict) and isinstance(data.get("paths"), str):
            return {**data, "paths": (data["paths"],)}
        return data

    @model_validator(mode="after")
    def _check_source(self) -> "DataSettings":
        if self.kind == "jsonl" and not self.paths:
            raise ValueError(
                "kind=jsonl reads files but paths is empty; pass data.paths=FILE or "
                "data.paths=[FILE,FOLDER]"
            )
        if self.kind == "hub" and not self.hub_name:
            raise ValueError("kind=hub needs the data set's name; pass data.hub_name=OWNER/NAME")
        if self.kind == "builtin" and self.answers == "given":
            raise ValueError(
                "answers=given needs answers in the data, but the shipped prompts (kind=builtin) "
                "have none; pass data.answers=target"
            )
        if self.learn == "all" and self.turns == "last":
            raise ValueError(
                "turns=last learns one answer of a chat, which learn=all would undo; pass "
                "turns=each or learn=answers"
            )
        if self.kind != "jsonl" and self.paths:
            raise ValueError(
                f"paths={list(self.paths)} would be ignored with kind={self.kind}; "
                "pass data=jsonl to read files"
            )
        if self.kind != "hub" and self.hub_name:
            raise ValueError(
                f"hub_name={self.hub_name} would be ignored with kind={self.kind}; pass data=hub"
            )
        return self
