"""What an evaluation's numbers depend on, written down so that nothing else is compared with it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftlab.decoding.settings import DecodeSettings
from draftlab.evaluation.results import Conditions
from draftlab.evaluation.settings import EvalSettings
from draftlab.runs.provenance import describe_machine, describe_versions
from draftlab.targets.target import Target

BASELINE_MEANING = (
    "the same target decoding one token a step in the same process, through the same kernels and "
    "caches, without a drafter"
)


def describe_conditions(
    target: Target,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    settings: EvalSettings,
    decode: DecodeSettings,
) -> Conditions:
    """Collect the conditions of an evaluation.

    Args:
        target: the target.
        prompts: domain -> token ids of its evaluation prompts.
        settings: the suite's.
        decode: how answers are decoded.
    """
    machine = describe_machine()
    spec = target.spec
    comparable: dict[str, Any] = {
        "target": spec.name,
        "weights": spec.checksum,
        "quantisation": spec.quantisation,
        "dtype": spec.dtype,
        "kernels": target.report.get("kernels"),
        **_name_attention(target),
        "device": str(target.device),
        "cpu": machine["cpu"],
        "gpus": [gpu["name"] for gpu in machine["gpus"]],
        "threads": machine["torch_threads"],
        "prompts_sha256": hash_prompts(prompts),
        "domains": {domain: len(items) for domain, items in prompts.items()},
        "temperature": decode.temperature,
        "top_k": decode.top_k,
        "top_p": decode.top_p,
        "min_p": decode.min_p,
        **_name_what_is_on(decode),
        "ignore_eos": decode.ignore_eos,
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "speed_prompts_per_domain": settings.speed_prompts_per_domain,
        "speed_max_new_tokens": settings.speed_max_new_tokens,
    }
    details: dict[str, Any] = {
        "baseline": BASELINE_MEANING,
        "target": spec.to_json(),
        "machine": machine,
        "versions": describe_versions(),
        "rule": decode.rule,
        "lossy": decode.lossy,
        # like K, these make answers faster or slower and no others: evaluations that differ in
        # them may be compared, and the comparison names them
        "tree": None if decode.tree is None else decode.tree.model_dump(mode="json"),
        "min_confidence": decode.min_confidence,
        "fallback": decode.fallback,
        "eval": settings.model_dump(mode="json"),
        "rows_bitwise_equal": target.report.get("rows_bitwise_equal"),
    }
    # through JSON and back, so that a result read from disk equals the one that was written
    plain = json.loads(json.dumps({"comparable": comparable, "details": details}))
    return Conditions(plain["comparable"], plain["details"])


def hash_prompts(prompts: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """Compute a fingerprint of the prompts as the target reads them: ids and domains."""
    plain = {domain: [list(ids) for ids in items] for domain, items in prompts.items()}
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def describe_law(decode: DecodeSettings) -> str:
    """Say how the target is sampled, naming what is on: "temperature 0.7, top_k 20"."""
    filters = {key: getattr(decode, key) for key in ("top_k", "top_p", "min_p")}
    on = {key: value for key, value in filters.items() if value is not None}
    words = [f"{key} {value}" for key, value in (on | _name_what_is_on(decode)).items()]
    greedy = " (greedy)" if decode.temperature == 0 else ""
    return ", ".join([f"temperature {decode.temperature:g}{greedy}", *words])


def _name_attention(target: Target) -> dict[str, Any]:
    """Give an attention kernel that is not torch's own; that one is not named, as in older ones."""
    name = target.report.get("attention", "sdpa")
    return {} if name == "sdpa" else {"attention": name}


def _name_what_is_on(decode: DecodeSettings) -> dict[str, Any]:
    """Give what changes logits or ends answers; what is off is not named, as in older results."""
    values: dict[str, tuple[Any, Any]] = {
        "repetition_penalty": (decode.repetition_penalty, 1.0),
        "frequency_penalty": (decode.frequency_penalty, 0.0),
        "presence_penalty": (decode.presence_penalty, 0.0),
        # as text: JSON has no word for -inf
        "logit_bias": ([f"{token}: {value}" for token, value in decode.sampling.logit_bias], []),
        "min_new_tokens": (decode.min_new_tokens, 0),
        "stop": (list(decode.stop), []),
    }
    return {key: value for key, (value, off) in values.items() if value != off}
