"""Self-speculation: which layers draft, on whose memory, and what they may write."""

import pytest
import torch

from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.self_speculative import (
    SelfSpeculative,
    SelfSpeculativeSettings,
    kept_layers,
)
from draftlab.errors import ConfigError
from draftlab.sampling import GREEDY, Sampling, process
from draftlab.settings.base import parse_settings
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target

ALL = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(**changes):
    data = {
        "kind": "self_speculative",
        "num_draft_tokens": 3,
        "skip_layers": None,
        "exit_layer": None,
        **changes,
    }
    return parse_settings(SelfSpeculativeSettings, data)


class Played:
    """A prompt of one row, run through the target and shown to a drafter."""

    def __init__(self, target, prompt=tuple(range(3, 15)), capacity=64, **changes):
        self.target = target
        self.drafter = SelfSpeculative(settings(**changes), target.view)
        self.kv = target.open_kv(1, capacity)
        self.length = len(prompt) - 1
        ids = torch.tensor([prompt[:-1]])
        target.run(self.kv, Step(torch.tensor([0]), ids, torch.tensor([0]), self.length))
        with torch.inference_mode():
            self.state = self.drafter.open(1, capacity, self.kv)
            after = torch.tensor([prompt[1:]])
            seen = Observation(
                torch.tensor([0]), ids, torch.tensor([self.length]), after, None, None
            )
            self.drafter.observe(self.state, seen)

    def propose(self, depth=3, sampling=GREEDY, **choices):
        budget = DraftBudget(torch.tensor([0]), depth, sampling, **choices)
        uniforms = torch.full((1, depth), 0.4, dtype=torch.float64)
        with torch.inference_mode():
            return self.drafter.propose(self.state, budget, uniforms)


# ---------------------------------------------------------------- which layers


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, (0, 2, 4, 5)),
        ({"skip_layers": [4, 1]}, (0, 2, 3, 5)),
        ({"exit_layer": 2}, (0, 1)),
    ],
)
def test_settings_choose_the_layers_that_draft(changes, kept):
    assert kept_layers(settings(**changes), 6) == kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skip_layers": [4]}, r"skip_layers=\[4\] of a target with 4 layers"),
        ({"skip_layers": list(ALL)}, "not all of them"),
        ({"skip_layers": []}, "at least one of"),
        ({"exit_layer": 4}, r"exit_layer=4 of a target with 4 layers: expected 1\.\.3"),
        ({"exit_layer": 2, "skip_layers": [3]}, "expected one of them"),
        ({"skip_layers": [1, 1]}, "names a layer twice"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_with_its_value(target, changes, message):
    with pytest.raises(ConfigError, match=message):
        SelfSpeculative(settings(**changes), target.view)


# ---------------------------------------------------------------- what they draft


def test_layers_that_change_nothing_when_left_out_make_perfect_drafts():
    target = tiny_target(seed=5)
    for layer in target.model.model.layers[2:]:  # their residual branches add nothing
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    expected = own_answer(target, Played(target, exit_layer=2), 3)
    for changes in ({"exit_layer": 2}, {"skip_layers": [2, 3]}, {"skip_layers": [3]}):
        assert Played(target, **changes).propose().tokens.tolist() == [expected]


def test_drafts_are_those_of_the_kept_layers_alone(target):
    played = Played(target, skip_layers=[1, 2])
    tree = played.propose()
    assert tree.tokens.tolist() == [own_answer(target, played, 3, layers=(0, 3))]


def own_answer(target, played, count, layers=ALL):
    """Decode greedily with some layers, on a copy of the row's memory."""
    kv = target.open_kv(1, 64)
    with torch.inference_mode():
        kv.data.copy_(played.kv.data)
    token, found = played.state.anchor[0], []
    for k in range(count):
        base = played.length + k
        step = Step(torch.tensor([0]), torch.tensor([[token]]), torch.tensor([base]), base + 1)
        hidden = target.view.run_layers(kv, step, layers)[0, 0]
        logits = target.view.head(target.view.final_norm(hidden))
        token = int(logits[: target.spec.num_token_ids].argmax())
        found.append(token)
    return found


def test_the_law_of_a_drawn_token_is_the_kept_layers_law(target):
    sampling = Sampling(temperature=0.7, top_k=9)
    played = Played(target, exit_layer=3)
    tree = played.propose(sampling=sampling)
    step = Step(
        torch.tensor([0]),
        torch.tensor([[played.state.anchor[0]]]),
        torch.tensor([played.length]),
        played.length + 1,
    )
    hidden = target.view.run_layers(played.kv, step, (0, 1, 2))[:, 0]
    logits = target.view.head(target.view.final_norm(hidden))
    logits[:, target.spec.num_token_ids :] = -torch.inf
    assert torch.allclose(tree.law_probs[0, :1], process(logits, sampling), atol=1e-12)


def test_point_drafts_are_the_likeliest_tokens_though_the_target_is_sampled(target):
    points = Played(target).propose(sampling=Sampling(temperature=1.0), points=True)
    assert points.tokens.tolist() == Played(target).propose().tokens.tolist()
    assert points.law_probs.shape[2] == 1


# ---------------------------------------------------------------- whose memory


def test_drafting_writes_only_past_the_committed_length(target):
    played = Played(target)
    before = played.kv.data[:, :, :, : played.length].clone()
    played.propose(sampling=Sampling(temperature=1.0))
    assert torch.equal(played.kv.data[:, :, :, : played.length], before)


def test_what_an_earlier_draft_wrote_is_never_read(target):
    fresh, used = Played(target), Played(target)
    used.propose()
    with torch.inference_mode():
        used.kv.data[:, :, :, used.length :] = 1e6
    assert used.propose().tokens.tolist() == fresh.propose().tokens.tolist()


def test_a_draft_at_the_context_limit_stays_inside_the_table_of_positions():
    target = tiny_target("gpt2", n_positions=32)
    prompt = tuple(range(3, 34))
    tree = Played(target, prompt=prompt, capacity=40).propose()
    assert tree.num_nodes.tolist() == [3]  # the decoder cuts what cannot be emitted


# ---------------------------------------------------------------- confidence


def test_confidence_is_told_only_when_asked_for_and_ends_a_chain(target):
    played = Played(target)
    assert played.propose().confidence is None
    asked = played.propose(min_confidence=0.0)
    assert asked.confidence.shape == (1, 3)
    first = float(asked.confidence[0, 0])
    cut = played.propose(min_confidence=min(1.0, first + 1e-6))
    assert cut.num_nodes.tolist() == [0]
    assert cut.tokens.shape == (1, 1)


def test_confidence_does_not_depend_on_the_token_drawn_at_its_node(target):
    played, found = Played(target), []
    for u in (0.01, 0.5, 0.99):
        budget = DraftBudget(torch.tensor([0]), 1, Sampling(temperature=3.0), min_confidence=0.0)
        with torch.inference_mode():
            tree = played.drafter.propose(
                played.state, budget, torch.full((1, 1), u, dtype=torch.float64)
            )
        found.append((tree.tokens[0, 0].item(), tree.confidence[0, 0].item()))
    assert len({token for token, _ in found}) > 1
    assert len({confidence for _, confidence in found}) == 1
