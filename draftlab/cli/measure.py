"""Evaluation as commands run it: prompts by settings, drafters by name, progress shown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftlab.cli.collect import encode_prompts
from draftlab.cli.keeping import note_provenance
from draftlab.cli.progress import StageTicker
from draftlab.data.conversations import read_files
from draftlab.data.prompts import load_prompts
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.verify import choose_rule
from draftlab.drafters.base import Drafter
from draftlab.errors import DataError
from draftlab.evaluation.results import EvalResult
from draftlab.evaluation.settings import EvalSettings
from draftlab.evaluation.suite import evaluate
from draftlab.targets.target import Target

_VALIDATION_SHARE = 4  # of a file of one's own, every 4th prompt a domain chooses K


def require_eval_prompts(settings: EvalSettings, cache: Path) -> None:
    """Refuse prompts that cannot be read, before a target is loaded for them.

    Raises:
        DataError: a missing file, or bad lines.
    """
    if settings.prompts != "builtin":
        read_files([settings.prompts], cache_dir=cache)


def require_decoding(decode: DecodeSettings) -> None:
    """Refuse a law that there is none of, and a rule that no drafter could be judged by under it.

    What depends on the drafter and on the target is refused once they are loaded.

    Raises:
        ConfigError: naming the setting.
    """
    choose_rule(
        decode.rule,
        greedy=decode.sampling.is_greedy,
        # the drafts that the rule is for: others are refused when the drafter is known
        tree=decode.rule == "without_replacement",
        draws=True,
        lossy=decode.lossy,
        epsilon=decode.lossy_epsilon,
        delta=decode.lossy_delta,
        threshold=decode.lossy_threshold,
    )


def load_eval_prompts(
    target: Target, settings: EvalSettings, cache: Path, *, template_options: Mapping[str, Any]
) -> tuple[dict[str, list[list[int]]], dict[str, list[list[int]]]]:
    """Load evaluation and validation prompts by domain, as token ids.

    A file of one's own has no validation part: every fourth prompt of a domain is set aside for
    choosing K, and none is used for both.

    Args:
        target: whose template and tokenizer.
        settings: where the prompts are.
        cache: folder for files of the `datasets` library.
        template_options: further variables of the chat template; others make another law, for
            which a drafter was not trained.

    Raises:
        DataError: bad lines, or no prompt.
    """
    if settings.prompts == "builtin":
        return (
            encode_prompts(target, load_prompts("evaluation"), template_options),
            encode_prompts(target, load_prompts("validation"), template_options),
        )
    reading = read_files([settings.prompts], cache_dir=cache)
    prompts = encode_prompts(target, list(reading.conversations), template_options)
    if not prompts:
        raise DataError(f"eval.prompts={settings.prompts} holds no prompt to evaluate on")
    held = {d: p[_VALIDATION_SHARE - 1 :: _VALIDATION_SHARE] for d, p in prompts.items()}
    rest = {
        domain: [
            ids for i, ids in enumerate(items) if i % _VALIDATION_SHARE != _VALIDATION_SHARE - 1
        ]
        for domain, items in prompts.items()
    }
    return rest, {domain: items for domain, items in held.items() if items}


def measure_drafters(
    target: Target,
    drafters: dict[str, Drafter],
    settings: EvalSettings,
    decode: DecodeSettings,
    *,
    template_options: Mapping[str, Any],
    folder: Path,
    cache: Path,
    earlier: EvalResult | None = None,
) -> EvalResult:
    """Run a suite over drafters, showing how far it is.

    Args:
        target: the target.
        drafters: name -> drafter.
        settings: what to measure.
        decode: how answers are decoded.
        template_options: further variables of the chat template.
        folder: where results and their provenance are written.
        cache: folder for files of the `datasets` library.
        earlier: the result of an earlier stage in the same folder, to merge into.

    Raises:
        DraftlabError: prompts that cannot be read, or what cannot be measured together.
    """
    prompts, validation = load_eval_prompts(
        target, settings, cache, template_options=template_options
    )
    ticker = StageTicker()
    try:
        with note_provenance(folder, seed=settings.seed, goes_on=earlier is not None):
            return evaluate(
                target,
                drafters,
                prompts,
                settings,
                decode,
                validation=validation,
                earlier=earlier,
                folder=folder,
                progress=ticker,
            )
    finally:
        ticker.close()
