"""The reduced draft vocabulary: which target ids a draft head can say.

Ids outside are never proposed, so the output stays exact and only acceptance pays: every token
outside is a sure rejection. Chosen once, from the answers to learn from; a trained head keeps its
vocabulary for life, because each output row means one token (case O-19). What it costs is told
before training: see measure_coverage.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from draftlab.errors import ConfigError
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.spec import TargetSpec
from draftlab.targets.view import TargetView

JUDGED_OF = 8  # predictions for each that is compared with the whole target law
_LARGE_LOGIT = 1000.0
_JUDGED_AT_ONCE = 64
_LONG_TAIL = 0.95  # below, more than one token in twenty is a sure rejection
_NAMED = 4


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Target ids a draft head predicts over; draft column i means target id `ids[i]`.

    Attributes:
        ids: ascending and unique.
        target_vocab_size: V, rows of the target's LM head.
    """

    ids: Int[Tensor, " Vd"]
    target_vocab_size: int

    def __post_init__(self) -> None:
        """Refuse ids that are no vocabulary."""
        ids = self.ids
        ordered = bool((ids[1:] > ids[:-1]).all())
        if not ordered or ids.numel() == 0 or ids[0] < 0 or ids[-1] >= self.target_vocab_size:
            raise ConfigError(
                f"draft vocabulary of {ids.numel()} ids: expected ascending, unique ids in "
                f"0..{self.target_vocab_size - 1}"
            )

    @property
    def size(self) -> int:
        """Vd, tokens."""
        return self.ids.shape[0]

    @property
    def d2t(self) -> Int[Tensor, " Vd"]:
        """Offsets as servers read them: target id = i + d2t[i]."""
        return self.ids - torch.arange(self.size, device=self.ids.device)

    @property
    def t2d(self) -> Bool[Tensor, " V"]:
        """True at target ids the draft can say."""
        known = torch.zeros(self.target_vocab_size, dtype=torch.bool, device=self.ids.device)
        known[self.ids] = True
        return known

    def coverage(self, counts: Int[Tensor, " V"]) -> float:
        """Compute the share of counted tokens that are inside, 0..1; 1 when nothing is counted."""
        total = int(counts.sum())
        return int(counts[self.ids.to(counts.device)].sum()) / total if total else 1.0


def choose_vocab(
    counts: Int[Tensor, " V"], size: int, *, always: Iterable[int], num_token_ids: int
) -> DraftVocab:
    """Choose the most frequent ids, and those that must never be missing.

    Args:
        counts: how often each target id is to be predicted; ties go to the lower id.
        size: Vd, tokens.
        always: ids inside whatever their count; those at or past `num_token_ids` are left out.
        num_token_ids: ids the tokenizer knows; padding rows past them are never chosen.

    Raises:
        ConfigError: `size` is below what must be inside, or above what there is.
    """
    required = sorted({i for i in always if 0 <= i < num_token_ids})
    if not len(required) <= size <= num_token_ids:
        raise ConfigError(
            f"draft_vocab_size={size}: expected at least {len(required)} (end, special, template "
            f"tokens) and at most {num_token_ids} (ids of the tokenizer); null means the whole "
            "vocabulary"
        )
    rank = counts[:num_token_ids].to(torch.int64).cpu().clone()
    rank[required] = torch.iinfo(torch.int64).max
    ids = rank.argsort(descending=True, stable=True)[:size].sort().values
    return DraftVocab(ids, counts.shape[0])


def required_ids(spec: TargetSpec, tokenizer: Any) -> list[int]:
    """List ids every draft vocabulary holds: end, special and added tokens, and the template's.

    Reserved and unused added tokens (Llama 3 has 250, Gemma 6,000) are left out: frequency decides.

    Args:
        spec: the target's identity, for its end tokens.
        tokenizer: the target's Hugging Face tokenizer.
    """
    ids = {*spec.eos_ids, *tokenizer.all_special_ids}
    for text, token_id in tokenizer.get_added_vocab().items():
        if "unused" not in text and "reserved" not in text:
            ids.add(token_id)
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids.update(tokenizer.encode(text, add_special_tokens=False))
    return sorted(i for i in ids if i < spec.num_token_ids)


def vocab_for(view: TargetView, size: int, counts: Int[Tensor, " V"]) -> DraftVocab:
    """Choose the draft vocabulary of a new drafter for a target."""
    always = required_ids(view.spec, view.tokenizer)
    return choose_vocab(counts, size, always=always, num_token_ids=view.spec.num_token_ids)


def kept_target_head(view: TargetView, vocab: DraftVocab | None) -> Float[Tensor, "Vd D"] | None:
    """Give the target's head rows of a draft vocabulary, where logits are just that product.

    Training then learns from these rows alone. None for a whole vocabulary, and for targets that
    scale or cap their logits: those take the whole head.
    """
    if vocab is None or vocab.size == vocab.target_vocab_size:
        return None
    ids = vocab.ids.to(view.device)
    rows = view.head_rows(ids)
    probe = torch.linspace(-1, 1, view.spec.hidden_size, device=view.device, dtype=view.dtype)
    # a bias or a scale shows in logits of any size, a cap only in large ones
    probes = torch.stack([probe, probe * (_LARGE_LOGIT / (rows @ probe).abs().max())])
    plain = (probes @ rows.T).float()
    whole = view.head(probes).index_select(-1, ids).float()
    gaps, sizes = (plain - whole).abs().amax(-1), whole.abs().amax(-1)
    return rows if bool((gaps <= 0.02 * sizes).all()) else None


def judged_rows(positions: Int[Tensor, " N"]) -> Bool[Tensor, " N"]:
    """Choose the predictions that are compared with the whole target law: one of JUDGED_OF.

    By position in the sample, so the choice does not depend on packing or ranks.
    """
    return positions % JUDGED_OF == 0


@dataclass(frozen=True, slots=True)
class VocabCoverage:
    """What a draft vocabulary leaves possible in one domain; shares of 0..1.

    Attributes:
        domain: its name, or "all".
        num_tokens: learned tokens counted.
        tokens: share of them that the draft can say at all.
        num_judged: learned tokens at which the target's law was looked at; 0 is none.
        argmax: share of the target's likeliest tokens inside: the most that greedy acceptance of a
            draft token can be. None when nothing was judged.
        mass: mean probability the target gives to tokens inside: the same for sampling.
    """

    domain: str
    num_tokens: int
    tokens: float
    num_judged: int
    argmax: float | None
    mass: float | None

    @property
    def ceiling(self) -> float:
        """The lowest of what is known."""
        return min(x for x in (self.tokens, self.argmax, self.mass) if x is not None)


@torch.no_grad()
def measure_coverage(
    vocab: DraftVocab,
    view: TargetView,
    learned: Mapping[str, Int[Tensor, " N"]],
    judges: Mapping[str, Float[Tensor, "M D"]],
) -> list[VocabCoverage]:
    """Measure coverage and acceptance ceiling by domain; all domains together come last.

    Args:
        vocab: the draft vocabulary.
        view: the target.
        learned: learned tokens of every domain.
        judges: final hidden states that predict some of them, by domain; may be empty.
    """
    known = vocab.t2d.cpu()
    ids = vocab.ids.to(view.device)
    found, sums = [], torch.zeros(5, dtype=torch.float64)
    for domain in sorted(learned):
        tokens = learned[domain].cpu()
        inside = float(known[tokens].sum())
        finals = judges.get(domain, torch.zeros(0, view.spec.hidden_size))
        hits = mass = 0.0
        for part in finals.split(_JUDGED_AT_ONCE):
            logits = view.head(part.to(view.device, view.dtype)).float()
            hits += float(known[logits.argmax(-1).cpu()].sum())
            mass += float(logits.softmax(-1).index_select(-1, ids).sum())
        mine = torch.tensor([len(tokens), inside, len(finals), hits, mass], dtype=torch.float64)
        sums += mine
        found.append(_coverage(domain, mine))
    return [*found, _coverage("all", sums)]


def describe_coverage(vocab: DraftVocab, coverages: list[VocabCoverage]) -> str:
    """Write the table of `measure_coverage`, and a warning for domains of a long tail."""
    width = max([len("domain"), *(len(c.domain) for c in coverages)])
    lines = [
        f"draft vocabulary: {vocab.size:,} of {vocab.target_vocab_size:,} ids; what is outside is "
        "always rejected",
        f"  {'domain':<{width}}  {'tokens':>10}  {'inside':>7}  {'argmax':>7}  {'mass':>7}",
    ]
    for c in coverages:
        shares = "  ".join(f"{_percent(x):>7}" for x in (c.tokens, c.argmax, c.mass))
        lines.append(f"  {c.domain:<{width}}  {c.num_tokens:>10,}  {shares}")
    lines.append(
        "  inside: learned tokens it can say; argmax, mass: the most that a draft token can be "
        "accepted, greedy and sampled"
    )
    tail = sorted((c for c in coverages[:-1] if c.ceiling < _LONG_TAIL), key=lambda c: c.ceiling)
    if tail:
        lowest = ", ".join(f"{c.domain} {_percent(c.ceiling)}" for c in tail[:_NAMED])
        lines.append(
            f"  long tail: {len(tail)} of {len(coverages) - 1} domains are below "
            f"{_percent(_LONG_TAIL)} ({lowest}{', ...' if len(tail) > _NAMED else ''}): raise "
            "drafter.draft_vocab_size (null: all), or train on more of these domains"
        )
    return "\n".join(lines)


def _coverage(domain: str, sums: Float[Tensor, "5"]) -> VocabCoverage:
    tokens, inside, judged, hits, mass = sums.tolist()
    return VocabCoverage(
        domain=domain,
        num_tokens=int(tokens),
        tokens=inside / tokens if tokens else 1.0,
        num_judged=int(judged),
        argmax=hits / judged if judged else None,
        mass=mass / judged if judged else None,
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
