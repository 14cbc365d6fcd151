"""What the contract tests share: every drafter kind on a tiny target, and a hand-driven decoder."""

from dataclasses import dataclass

import torch
import yaml
from other_vocabulary import other_model
from toy_drafters import TOYS

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import (
    DraftBudget,
    DraftVocabSettings,
    Observation,
    drafter_class,
    drafter_kinds,
)
from draftlab.drafters.store import build_drafter
from draftlab.randomness import uniforms
from draftlab.sampling import GREEDY
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.step import Step

# one case a kind as its yaml has it, and one for each choice that changes the code that runs
VARIANTS = {
    "medusa-own": {"head": "own", "num_blocks": 2},
    "medusa-low_rank": {"head": "low_rank", "head_rank": 8},
    "medusa-reduced": {"draft_vocab_size": 120},
    "eagle-reduced": {
        "draft_vocab_size": 120,
        "num_layers": 2,
        "fc_bias": True,
        "sliding_window": 6,
    },
    "eagle3-reduced": {"draft_vocab_size": 120},
    "self_speculative-exit": {"exit_layer": 2},
    "suffix-global": {"num_global_tokens": 400},
    "hybrid-mixed": {"head_accepts": 0.6},  # about half of the rows copy
    "hetero-slem": {"method": "slem"},
    "dflash-causal": {"causal": True, "sliding_window": 8, "mask_token_id": 300},
    "dflash-reduced": {"draft_vocab_size": 120, "max_anchors": 4},
    "dspark-reduced": {"draft_vocab_size": 120, "markov_table": False, "markov_rank": 16},
    "hydra-plain": {
        "prefix_attention": False,
        "head": "low_rank",
        "head_rank": 8,
        "draft_vocab_size": 120,
        "position_weights": "d_pace",
        "head_decay": None,
    },
    "mtp-mimo": {
        "attention_bias": True,
        "hidden_first": True,
        "draft_vocab_size": 120,
        "position_weights": "d_pace",
        "step_decay": None,
    },
}
KINDS = drafter_kinds()
CASES = sorted({*KINDS, *VARIANTS, *TOYS})
K = 3


def settings_of(case):
    """Read the yaml of a case's kind, with the case's changes."""
    if case in TOYS:
        data = {"kind": case}
    else:
        path = conf_dir() / "drafter" / f"{case.split('-')[0]}.yaml"
        data = yaml.safe_load(path.read_text(encoding="utf-8")) | VARIANTS.get(case, {})
    data["num_draft_tokens"] = K
    if data.get("model") == "???":
        data["model"] = other_model()
    return parse_settings(drafter_class(data["kind"]).settings_class, data)


def make(case, target):
    """Build a case's drafter for a tiny target, in the target's dtype."""
    settings = settings_of(case)
    counts = torch.arange(target.spec.vocab_size)
    reduced = isinstance(settings, DraftVocabSettings) and settings.draft_vocab_size is not None
    drafter = build_drafter(settings, target.drafter_view, counts if reduced else None)
    return drafter.to(target.dtype).eval()


@dataclass
class Session:
    """Plays the decoder by hand for one state: runs the target and shows it to the drafter."""

    target: object
    drafter: object
    slots: int = 2

    def __post_init__(self):
        self.kv = self.target.open_kv(self.slots, 96)
        with torch.inference_mode():
            self.state = self.drafter.open(self.slots, 96, self.kv)
        self.lengths = [0] * self.slots

    def show(self, row, ids, anchor):
        """Process positions of a row and let the drafter observe them."""
        step = Step(
            rows=torch.tensor([row]),
            ids=torch.tensor([ids]),
            base=torch.tensor([self.lengths[row]]),
            live=self.lengths[row] + len(ids),
        )
        out = self.target.run(self.kv, step, request=self.drafter.needs, wants_logits=False)
        self.lengths[row] += len(ids)
        with torch.inference_mode():
            self.drafter.observe(
                self.state,
                Observation(
                    rows=torch.tensor([row]),
                    ids=torch.tensor([ids]),
                    lengths=torch.tensor([len(ids)]),
                    next_ids=torch.tensor([[*ids[1:], anchor]]),
                    taps=out.features.taps,
                    final=out.features.final,
                ),
            )

    def show_in_chunks(self, row, ids, anchor, width):
        """Process positions a few at a time."""
        for start in range(0, len(ids), width):
            piece = ids[start : start + width]
            self.show(row, piece, [*ids, anchor][start + len(piece)])

    def propose(self, rows, sampling=GREEDY, depth=K):
        """Ask for drafts; the same uniforms every time."""
        draws = uniforms(7, torch.arange(len(rows)).unsqueeze(1), torch.arange(depth))
        with torch.inference_mode():
            budget = DraftBudget(torch.tensor(rows), depth, sampling)
            return self.drafter.propose(self.state, budget, draws)

    def close(self, row):
        """Empty a slot."""
        with torch.inference_mode():
            self.drafter.close(self.state, torch.tensor([row]))
        self.lengths[row] = 0


def assert_same_trees(a, b):
    """Equal drafts, and equal laws up to rounding, of the nodes that count."""
    assert a.num_nodes.tolist() == b.num_nodes.tolist()
    for row, count in enumerate(a.num_nodes.tolist()):
        assert a.tokens[row, :count].tolist() == b.tokens[row, :count].tolist()
        assert torch.allclose(a.law_probs[row, :count], b.law_probs[row, :count], atol=1e-6)


def some_ids(count, seed=0, known=200):
    """Random ids with repeats in them, so that prompt lookup has something to find."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(known, (count // 2 + 1,), generator=generator).tolist()
    return (half + half)[:count]


def training_batch(seed=0):
    """Two rows, three samples, padding: packed, with prompts that are not learned."""
    width = 40
    ids = torch.randint(200, (2, width), generator=torch.Generator().manual_seed(seed))
    segments = torch.full((2, width), -1)
    positions = torch.zeros(2, width, dtype=torch.int64)
    mask = torch.zeros(2, width, dtype=torch.bool)
    samples = torch.full((2, width), -1)
    for row, segment, start, stop, sample in (
        (0, 0, 0, 18, 5),
        (0, 1, 18, 36, 6),
        (1, 0, 0, 30, 7),
    ):
        segments[row, start:stop] = segment
        samples[row, start:stop] = sample
        positions[row, start:stop] = torch.arange(stop - start)
        mask[row, start + 6 : stop] = True
    ids[segments < 0] = 0
    return TokenBatch(ids, mask, positions, segments, samples)


def alone(batch, sample):
    """Give one sample of a packed batch as a batch of its own."""
    row, columns = (batch.sample_ids == sample).nonzero(as_tuple=True)
    pick = [t[row, columns].unsqueeze(0) for t in (batch.input_ids, batch.loss_mask)]
    place = torch.arange(columns.shape[0]).unsqueeze(0)
    return TokenBatch(*pick, place, torch.zeros_like(place), torch.full_like(place, sample))
