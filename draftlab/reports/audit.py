"""An audit in words: the verdict first, then what it rests on and what it could not have seen."""

from draftlab.evaluation.audit_results import (
    AuditReport,
    DraftCounts,
    GreedyPart,
    SampledPart,
    SeedCheck,
    forks_per_thousand,
)
from draftlab.evaluation.two_sample import POWER, FeatureTest
from draftlab.reports.words import count, plural

# shift from which on a sampled part is called a weak one
_BLIND = 0.15


def audit_headline(report: AuditReport) -> str:
    """Say the verdict in one sentence."""
    where = f"{report.drafter} (K = {report.num_draft_tokens}) on {_target(report)}"
    sampled = report.sampled
    failed = []
    if not report.greedy.passes:
        defects = plural(report.greedy.verdict.num_defects, "token")
        failed.append(f"{defects} of the greedy answers are not the target's own")
    if sampled and sampled.is_lossy:
        failed.append(f"rule={sampled.rule} is LOSSY: sampled answers do not have the target's law")
    elif sampled and sampled.differs:
        failed.append("sampled answers do not follow the target's law")
    if sampled and sampled.same_seed and not sampled.same_seed.passes:
        failed.append("one seed gives other tokens with drafts than without")
    if failed:
        return f"FAILED, not lossless. {where}: {'; '.join(failed)}."
    drafts = [report.greedy.drafts, *([sampled.drafts] if sampled else [])]
    if not any(part.num_drafted for part in drafts):
        return f"PASSED, but proves nothing. {where}: no draft token was ever judged."
    greedy_told, sampled_told = (
        f"the {name} part proves nothing, for no draft token was judged in it"
        for name in ("greedy", "sampled")
    )
    if report.greedy.drafts.num_drafted:
        greedy_told = "greedy answers are the target's own"
    if sampled is None:
        return f"PASSED. {where}: {greedy_told}. Sampling was not audited."
    if sampled.drafts.num_drafted:
        sampled_told = f"no difference in sampled answers; {_sight(sampled)}"
    return f"PASSED. {where}: {greedy_told}; {sampled_told}."


def audit_lines(report: AuditReport) -> list[str]:
    """List what the verdict rests on, a line each."""
    lines = ["greedy", *(f"  {line}" for line in _greedy_lines(report.greedy))]
    if report.sampled is None:
        return [*lines, "sampled", "  not audited: decode.temperature is 0"]
    return [*lines, "sampled", *(f"  {line}" for line in _sampled_lines(report.sampled))]


def _sight(part: SampledPart) -> str:
    """Say how small a shift between tokens likely and unlikely the sampled part would have found.

    No more: a law may differ within the bins of ranks, and no test looks there.
    """
    by_rank = [test.detectable_tv for test in part.tests if "by rank" in test.name]
    sizes = [size for size in by_rank if size is not None]
    if not sizes:
        return "but there were too few sampled answers to find any difference: raise audit.minutes"
    found = f"a shift of {min(sizes):.2f} between the ranks of tokens would have been found"
    few = "but only " if min(sizes) > _BLIND else ""
    more = ": raise audit.minutes" if few else ""
    return f"{few}{found}{more}"


def _target(report: AuditReport) -> str:
    target = report.conditions["target"]
    return f"{target['name']} in {report.conditions['dtype']}"


def _greedy_lines(part: GreedyPart) -> list[str]:
    verdict = part.verdict
    lines = [
        f"{plural(verdict.num_defects, 'defect')} in {plural(verdict.num_positions, 'token')} of "
        f"{plural(verdict.num_prompts, 'answer')}, each token scored again after its own prefix, "
        "one token a pass",
        _tolerance_line(part),
        f"forks per 1,000 tokens: {forks_per_thousand(verdict):.1f} with drafts; "
        f"{forks_per_thousand(part.noise):.1f} without any, {part.noise_width} prompts at once",
        f"{verdict.num_identical} of {verdict.num_compared} answers equal plain decoding token for "
        f"token; {part.noise.num_identical} of {part.noise.num_compared} do without drafts, "
        f"{part.noise_width} at once",
        _draft_line(part.drafts),
    ]
    lines += [
        f"DEFECT: prompt {d.prompt}, token {d.position + 1}: id {d.emitted_id}, but the target "
        f"says {d.expected_id}, {d.margin:.3g} logit units above"
        for d in verdict.defects[:5]
    ]
    return lines


def _tolerance_line(part: GreedyPart) -> str:
    verdict = part.verdict
    if verdict.num_ties + verdict.num_defects == 0:
        return "every token is the target's own first choice; no tolerance was needed"
    if verdict.tolerance == 0:
        return (
            "no tolerance: passes as wide as verification and passes one token wide were found "
            f"equal bit for bit; largest margin seen {verdict.worst_margin:.3g} logit units"
        )
    return (
        f"{plural(verdict.num_ties, 'numerical tie')}: no more than {verdict.tolerance:.3g} logit "
        "units below the largest (twice the 99.9th percentile of what wide passes move logits "
        f"here); largest margin seen {verdict.worst_margin:.3g}"
    )


def _draft_line(drafts: DraftCounts) -> str:
    if not drafts.num_drafted:
        return "no draft token was judged here: this part proves nothing about the rule"
    refused = drafts.num_drafted - drafts.num_accepted
    return (
        f"{plural(drafts.num_drafted, 'draft token')} verified: {count(drafts.num_accepted)} kept, "
        f"{count(refused)} not"
    )


def _sampled_lines(part: SampledPart) -> list[str]:
    lines = [f"rule {part.rule}, {part.sampling}"]
    if part.is_lossy:
        lines.append(f"LOSSY: rule={part.rule} does not keep the target's law, by construction")
    lines.append(
        f"{plural(part.num_draws, 'answer')} to {plural(part.num_prompts, 'prompt')} with drafts "
        f"({plural(part.num_tokens, 'token')}) and as many without: "
        + ("DIFFERENT" if part.differs else "no difference")
        + f" at alpha {part.alpha:g} over {plural(_tested(part), 'test')} (Holm)"
    )
    lines += [_test_line(test) for test in part.tests]
    lines.append(
        "TV is the distance between the two histograms; a true one from the last figure on is "
        f"found with {POWER:.0%} or more. Smaller ones may go unseen, and so may laws that differ "
        "only inside a bin (ranks: 1, 2, 3, 4-5, 6-9, 10-17, 18-65, more)"
    )
    lines.append(_draft_line(part.drafts))
    lines.append(
        f"the law itself, passes as wide as verification against one token wide: TV "
        f"{part.mean_tv:.2g} on average, {part.worst_tv:.2g} at worst, at "
        f"{plural(part.num_compared, 'place')}"
    )
    if part.same_seed is not None:
        lines += _seed_lines(part.same_seed)
    return lines


def _tested(part: SampledPart) -> int:
    return sum(test.num_bins > 1 for test in part.tests)


def _test_line(test: FeatureTest) -> str:
    if test.num_bins < 2:
        return f"{test.name:<26} not testable: answers alike, or too few"
    seen = "none" if test.detectable_tv is None else f"{test.detectable_tv:.3f}"
    mark = "  DIFFERENT" if test.differs else ""
    return (
        f"{test.name:<26} p {test.p_value:<8.2g} adjusted {test.adjusted_p:<8.2g} TV {test.tv:.3f} "
        f"({test.tv_by_chance:.3f} by chance), finds {seen}{mark}"
    )


def _seed_lines(check: SeedCheck) -> list[str]:
    same = (
        f"same seed: {check.num_identical} of {check.num_answers} answers with drafts equal plain "
        f"sampling token for token ({plural(check.num_tokens, 'token')})"
    )
    ties = sum(fork.is_tie for fork in check.forks)
    lines = [same]
    if ties:
        lines.append(
            f"{plural(ties, 'fork')} where the random number lies within {check.tolerance:.2g} of "
            "the border between the two tokens: rounding"
        )
    lines += [
        f"DEFECT: prompt {f.prompt}, token {f.position + 1}: id {f.plain_id} without drafts, "
        f"{f.drafted_id} with them, {f.distance:.2g} away in probability"
        for f in check.forks
        if not f.is_tie
    ]
    return lines
