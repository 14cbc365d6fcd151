"""Position weights and normalisation of every family, against an eager form from the same states."""

import pytest
import torch
import yaml
from eagle_kit import make_batch, random_tokens, samples

from draftlab.drafters import _depth_scores
from draftlab.drafters.base import drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.objectives.features import smooth_l1
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target

# small, without samples drawn among rows, and what is added to the loss between the laws
FAMILIES = {
    "medusa": {"num_heads": 3, "head": "own"},
    "hydra": {"num_heads": 3},
    "eagle": {"hass_steps": 3, "feature_weight": 0.5, "feature_noise": 0.0},
    "eagle3": {"unroll_steps": 3, "train_head": True},
    "peagle": {"num_depths": 3, "num_layers": 1, "depth_keep": 1.0},
    "mtp": {"unroll_steps": 3},
    "dflash": {"block_size": 4, "num_layers": 1, "max_anchors": None},
    "dspark": {"block_size": 3, "num_layers": 1, "max_anchors": None, "confidence_weight": 0.0},
}
CHOSEN = [*samples(), (random_tokens(18, 4), 3)]  # tokens, and the first one learned
DECAY = 0.6


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def build(kind, target, how, normalise):
    data = yaml.safe_load((conf_dir() / "drafter" / f"{kind}.yaml").read_text(encoding="utf-8"))
    key = "head_decay" if "head_decay" in data else "step_decay"
    data |= FAMILIES[kind] | {"num_draft_tokens": 3, "objective": "lk_hybrid"}
    data |= {"position_weights": how, key: DECAY if how == "decay" else None}
    data |= {"normalise": normalise}
    settings = parse_settings(drafter_class(kind).settings_class, data)
    drafter = build_drafter(settings, target.view).to(target.dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in drafter.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return drafter


def learned_tokens():
    """(sample, place in it) of the tokens that something predicts, as rows lay them out."""
    return [
        (i, p) for i, (ids, first) in enumerate(CHOSEN) for p in range(2, len(ids)) if p >= first
    ]


def eager_weights(probs, how, is_block):
    """What depth k of the chain that starts 2 + k tokens before a token weighs, one by one.

    A block begins only where its first token is learned; the chain of a row, wherever any is.
    """
    tokens = learned_tokens()
    weights = torch.zeros_like(probs)
    for n, (sample, place) in enumerate(tokens):
        for k in range(3):
            start = place - 2 - k
            if start < 0 or (is_block and (sample, start + 2) not in tokens):
                continue
            if how == "decay":
                weights[k, n] = DECAY**k
                continue
            reached = 1.0
            for j in range(3):
                if (sample, start + 2 + j) not in tokens:
                    continue
                reached *= 0.5 + 0.5 * probs[j, tokens.index((sample, start + 2 + j))].item()
                weights[k, n] += reached if j >= k else 0.0
    return weights


def eager_loss(drafter, hidden, heads, given, how, normalise):
    logits = given["target_head"](given["target_final"])
    losses, probs = [], []
    for k in range(3):
        draft = hidden[k] @ heads[k if len(heads) > 1 else 0].T
        losses.append(score_rows(objective("lk_hybrid"), logits, draft, given["labels"]).loss)
        probs.append(draft.detach().softmax(-1).gather(1, given["labels"].unsqueeze(1))[:, 0])
        if drafter.kind == "eagle":
            losses[k] = losses[k] + 0.5 * smooth_l1(hidden[k], given["target_final"])
    weights = eager_weights(torch.stack(probs), how, drafter.kind in ("dflash", "dspark"))
    if normalise == "token":
        return (torch.stack(losses) * weights).sum(), weights.sum()
    numbers = torch.tensor([sample for sample, _ in learned_tokens()])
    shares = [weights[:, numbers == number].sum() for number in range(len(CHOSEN))]
    return (torch.stack(losses) * weights / torch.stack(shares)[numbers]).sum(), None


@pytest.mark.parametrize("normalise", ["sequence", "token"])
@pytest.mark.parametrize("how", ["decay", "d_pace"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_weighs_its_predictions_as_the_eager_form_does(
    target, monkeypatch, kind, how, normalise
):
    drafter = build(kind, target, how, normalise)
    batch = make_batch(CHOSEN, 18)
    seen = []
    scored = _depth_scores.chunked_scores

    def note(chosen, hidden, heads, **given):
        seen.append((hidden, heads, given))
        return scored(chosen, hidden, heads, **given)

    monkeypatch.setattr(_depth_scores, "chunked_scores", note)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    ((hidden, heads, given),) = seen
    labels = [CHOSEN[sample][0][place] for sample, place in learned_tokens()]
    assert given["labels"].tolist() == labels
    total, weight = eager_loss(drafter, hidden, heads, given, how, normalise)
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-9)
    assert drafter.averages_tokens == (normalise == "token")
    if normalise == "token":
        assert loss.weight.item() == pytest.approx(weight.item(), rel=1e-9)
    else:
        assert loss.weight is None
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    got = torch.autograd.grad(loss.total, parameters, retain_graph=True, allow_unused=True)
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-10)
