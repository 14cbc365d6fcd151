"""Small drafters of every kind on the target's hidden states."""

import torch
import yaml

from draftlab.drafters.base import drafter_class
from draftlab.drafters.vocab import DraftVocab
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir

REDUCED = torch.tensor([i for i in range(261) if i % 3 or i == 256])
BLOCKS = {"num_draft_tokens": 3, "num_layers": 2, "max_anchors": None}
BLOCKS |= {"position_weights": "decay", "step_decay": 0.8}
# what makes a kind small, and draws nothing while training
SMALL = {
    "eagle": {"feature_noise": 0.0},
    "eagle3": {},
    "peagle": {"num_layers": 2, "num_depths": 4, "num_draft_tokens": 4},
    "mtp": {},
    "dflash": {"block_size": 4, **BLOCKS},
    "dspark": {"block_size": 3, "markov_rank": 8, **BLOCKS},
    "hydra": {"num_heads": 3, "num_draft_tokens": 3, "prefix_attention": False},
    "medusa": {"num_heads": 3, "num_draft_tokens": 3},
}


def settings(kind, **changes):
    data = yaml.safe_load((conf_dir() / "drafter" / f"{kind}.yaml").read_text(encoding="utf-8"))
    return parse_settings(drafter_class(kind).settings_class, data | SMALL[kind] | changes)


def build(kind, target, vocab_ids=None, *, stir=0.0, **changes):
    """Build a small drafter in the target's dtype, its parameters moved by `stir` at random."""
    vocab = None if vocab_ids is None else DraftVocab(vocab_ids, target.spec.vocab_size)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = drafter_class(kind)(settings(kind, **changes), target.view, vocab=vocab)
        drafter = made.to(target.dtype)
        for parameter in drafter.parameters() if stir else ():
            parameter += stir * torch.randn_like(parameter)
    return drafter
