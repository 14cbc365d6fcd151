"""The README.md of an export: a model card that carries the command to serve it."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftlab.targets.spec import TargetSpec


@dataclass(frozen=True, slots=True)
class Card:
    """What a model card says.

    Attributes:
        title: heading.
        base_model: the target, as the command names it.
        revision: of a hub target, where one is pinned.
        license: licence id.
        library: `library_name`.
        architecture: of the drafter.
        about: what the network is.
        command: starts the server.
        usage: markdown on other ways to load it; may be empty.
        limits: a sentence each.
    """

    title: str
    base_model: str
    revision: str | None
    license: str
    library: str
    architecture: str
    about: str
    command: str
    usage: str
    limits: tuple[str, ...]


def serve_command(
    target: str,
    method: str,
    folder: Path,
    num_draft_tokens: int,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    revision: str | None = None,
) -> str:
    """Give the shell command that serves a target with this drafter in vLLM."""
    # the method is always named: left out, it would be guessed from the folder's name
    config = {
        "method": method,
        "model": str(folder),
        "num_speculative_tokens": num_draft_tokens,
        **options,
    }
    words = ["vllm", "serve", target]
    if revision is not None:
        words += ["--revision", revision]
    if overrides:
        words += ["--hf-overrides", json.dumps(dict(overrides))]
    # folders are named as they are written: a shell and JSON take any letter
    words += ["--speculative-config", json.dumps(config, ensure_ascii=False)]
    return " ".join(shlex.quote(word) for word in words)


def write_card(path: Path, card: Card, spec: TargetSpec, history: Mapping[str, Any]) -> None:
    """Write a model card.

    Args:
        path: of README.md.
        card: what it says.
        spec: the target the drafter was exported for.
        history: how it was trained; nothing known is said to be so.
    """
    front: dict[str, Any] = {
        "base_model": card.base_model,
        "license": card.license,
        "library_name": card.library,
        "tags": ["speculative-decoding", "draft-model", card.architecture, "draftlab"],
    }
    if card.license == "other":
        front["license_name"] = "as-the-base-model"
    facts = {
        "name": spec.name,
        **({} if card.revision is None else {"revision": card.revision}),
        "quantisation": spec.quantisation,
        "weights checksum": spec.checksum[:16],
        "tokenizer checksum": spec.tokenizer_sha256[:16],
        "longest sequence": f"{spec.max_positions} tokens",
    }
    limits = list(card.limits)
    if spec.quantisation != "none":
        limits.append(
            f"Made for weights that are {spec.quantisation}: with others the output is theirs and "
            "stays exact, but fewer drafts may be accepted."
        )
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {card.title}",
        f"{card.about} It proposes tokens for `{card.base_model}`, which verifies every one, so "
        "the served output is the target's own; only the speed depends on this drafter.",
        f"## Serve it\n\n```\n{card.command}\n```",
        card.usage,
        f"## Target\n\n{_table(facts)}",
        f"## Training\n\n{_table(_flat(history)) if history else 'Nothing is recorded.'}",
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits),
        "Checksums of all files are in SHA256SUMS (`sha256sum -c SHA256SUMS`). Written by "
        "draftlab.",
    ]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _table(facts: Mapping[str, Any]) -> str:
    lines = ["| what | value |", "| --- | --- |"]
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")
