"""`draftlab audit`: does a drafter change what the target says?"""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

from draftlab.cli.disk import require_writable
from draftlab.cli.words import refuse_replaced, split_words
from draftlab.runs.run_dir import write_json
from draftlab.settings.compose import compose

HELP = """usage: draftlab audit drafter=DRAFTER [target=...] [audit.minutes=5] [key=value ...]

Checks, on your target in its dtype and with its kernels, that decoding with this drafter gives what
the target alone gives. Nothing here is taken from the passes that verified drafts.

greedy   Every token of every answer is scored again by the target alone, after its own prefix and
         one token a pass. A token below the largest logit by more than the tolerance is a defect.
         The tolerance is measured (how far wide passes move logits on the same prefixes); where
         they move nothing there is none. Beside it: how often plain decoding itself forks when
         several prompts run at once. That is the rounding you live with anyway.
sampled  Many short answers with drafts and without, compared as draws of one law: first tokens
         together, each place by the rank of its token, all tokens against their probabilities,
         lengths. Holm's correction; alpha and the smallest difference that is surely found are
         printed. With rule=sampled_verify also: the same seed gives the same tokens.

Ends with exit code 3 when something speaks against losslessness. LOSSY rules always do. Writes
audit.json (audit-2.json, ...: nothing is overwritten), which names this command and the versions,
into the run that the drafter belongs to, else, or with another target than the run's, into a run of
its own.

  drafter=DRAFTER              ngram, a run, a drafter folder or a hub id
  target=... hardware=...      a run's own when left out; target.dtype=float32 for another dtype
  audit.minutes=5              time for sampled answers, or their number: audit.samples=2048
  audit.prompts=12 audit.max_new_tokens=64      greedy answers
  audit.sampled_prompts=2 audit.sampled_tokens=8 audit.alpha=0.001
  decode=sampled|greedy        sampled (the default) audits both parts; greedy the first alone
  decode.rule=RULE             block, speculative, point_mass, sampled_verify, ...
  decode.temperature=0.7 decode.top_p=0.9 decode.num_draft_tokens=4 decode.tree={...}
  eval.prompts=my.jsonl        prompts of your own

examples:
  draftlab audit drafter=ngram target=demo
  draftlab audit drafter=outputs/demo/20261129-101500-ab12 audit.minutes=20
  draftlab audit drafter=ngram target=demo decode.rule=sampled_verify audit.samples=512
"""

_REPLACED = {
    "decode.max_new_tokens": "audit.max_new_tokens, or audit.sampled_tokens for sampled answers"
}


def run(args: Sequence[str]) -> int:
    """Audit, write audit.json, and say the verdict."""
    _, words = split_words(args, most=0)
    refuse_replaced(words, "audit", _REPLACED)
    compose("audit", words)  # a misspelt word is told before torch is loaded
    from draftlab.cli.drafters import compose_for_drafters, open_drafter
    from draftlab.cli.hardware import apply_hardware, place_drafters
    from draftlab.cli.keeping import find_home, own_run
    from draftlab.cli.measure import load_eval_prompts, require_decoding, require_eval_prompts
    from draftlab.cli.progress import StageTicker
    from draftlab.cli.schema import AuditCommandSettings, settings_of
    from draftlab.errors import LosslessViolation
    from draftlab.evaluation.audit import audit_drafter
    from draftlab.evaluation.audit_results import report_to_json
    from draftlab.reports.audit import audit_headline, audit_lines
    from draftlab.runs.provenance import collect_provenance
    from draftlab.targets.load import load_target, resolve

    settings = settings_of(AuditCommandSettings, compose_for_drafters("audit", words))
    require_decoding(settings.decode)
    require_eval_prompts(settings.eval, settings.paths.cache / "data")
    apply_hardware(settings.hardware, places_drafters=True)
    settings = settings.model_copy(update={"target": resolve(settings.target)})
    home = find_home([settings.drafter], settings, words)
    require_writable(home.path if home else settings.paths.outputs)
    provenance = collect_provenance(seed=settings.audit.seed)
    target = load_target(settings.target)
    place_drafters(target, settings.hardware)
    drafter = open_drafter(settings.drafter, target)
    prompts, _ = load_eval_prompts(
        target,
        settings.eval,
        settings.paths.cache / "data",
        template_options=settings.data.template_options,
    )
    ticker = StageTicker()
    try:
        report = audit_drafter(
            target, drafter, prompts, settings.audit, settings.decode, progress=ticker
        )
    finally:
        ticker.close()
    with nullcontext(home) if home else own_run(settings, "audit") as owner:
        # one file an audit: the verdict on one rule does not replace another's
        names = itertools.chain(["audit.json"], (f"audit-{i}.json" for i in itertools.count(2)))
        path = next(p for name in names if not (p := owner.path / name).exists())
        write_json(path, {**report_to_json(report), "provenance": provenance})
    headline = audit_headline(report)
    print("\n".join([*audit_lines(report), headline, f"written to {path}"]))
    if not report.passes:
        raise LosslessViolation(f"{headline} The findings stand above and in {path}")
    return 0
