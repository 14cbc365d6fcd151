"""Hybrid: who drafts which row, what the choice may see, and that the law stays the target's."""

from dataclasses import replace

import pytest
import torch
import yaml

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.base import DraftBudget, Observation, drafter_class
from draftlab.drafters.hybrid import Hybrid, HybridSettings, merge_rows, promised_tokens
from draftlab.drafters.medusa import Medusa
from draftlab.drafters.store import build_drafter, save_drafter
from draftlab.drafters.suffix import SuffixSettings
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError, NotExportable
from draftlab.sampling import GREEDY, Sampling, SamplingRows, process, residual
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target

COPIED, DRAFTED = 0, 1  # the rows below: one repeats itself, one never does
REPEATS = [7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
NEWS = [31, 12, 53, 24, 85, 16]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(**changes):
    path = conf_dir() / "drafter" / "hybrid.yaml"
    return parse_settings(HybridSettings, yaml.safe_load(path.read_text()) | changes)


class Played:
    """Both rows, run through the target and shown to a hybrid."""

    def __init__(self, target, **changes):
        self.target = target
        self.hybrid = build_drafter(settings(**changes), target.view).to(target.dtype).eval()
        self.kv = target.open_kv(2, 64)
        with torch.inference_mode():
            self.state = self.hybrid.open(2, 64, self.kv)
        for row, ids in enumerate((REPEATS, NEWS)):
            given = torch.tensor([ids[:-1]])
            step = Step(torch.tensor([row]), given, torch.tensor([0]), len(ids) - 1)
            out = target.run(self.kv, step, request=self.hybrid.needs, wants_logits=False)
            seen = Observation(
                rows=torch.tensor([row]),
                ids=given,
                lengths=torch.tensor([len(ids) - 1]),
                next_ids=torch.tensor([ids[1:]]),
                taps=out.features.taps,
                final=out.features.final,
            )
            with torch.inference_mode():
                self.hybrid.observe(self.state, seen)

    def propose(self, rows=(0, 1), depth=3, sampling=GREEDY, uniform=0.3, drafter=None, **choices):
        drafter = drafter or self.hybrid
        state = {
            self.hybrid: self.state,
            self.hybrid.head: self.state.head,
            self.hybrid.model_free: self.state.model_free,
        }[drafter]
        budget = DraftBudget(torch.tensor(list(rows)), depth, sampling, **choices)
        draws = torch.full((len(rows), depth), uniform, dtype=torch.float64)
        with torch.inference_mode():
            return drafter.propose(state, budget, draws)


def chain(tree, row):
    return tree.tokens[row, : int(tree.num_nodes[row])].tolist()


# ---------------------------------------------------------------- who drafts


def test_each_row_takes_its_own_best_drafter(target):
    played = Played(target)
    tree = played.propose()
    assert chain(tree, COPIED) == [4, 5, 6]
    assert chain(tree, DRAFTED) == chain(played.propose((1,), drafter=played.hybrid.head), 0)


def test_the_head_does_not_run_for_rows_that_copy(target, monkeypatch):
    played, asked = Played(target), []
    real = played.hybrid.head.propose

    def watched(state, budget, uniforms):
        asked.append(budget.rows.tolist())
        return real(state, budget, uniforms)

    monkeypatch.setattr(played.hybrid.head, "propose", watched)
    played.propose()
    played.propose((COPIED,))
    assert asked == [[DRAFTED]]


def test_the_threshold_is_what_the_head_accepts(target):
    copies_all, copies_none = Played(target, head_accepts=0.0), Played(target, head_accepts=9.0)
    assert chain(copies_all.propose(), COPIED) == [4, 5, 6]
    tree = copies_none.propose()
    alone = copies_none.propose(drafter=copies_none.hybrid.head)
    assert tree.tokens.tolist() == alone.tokens.tolist()


def test_the_choice_does_not_depend_on_what_is_drawn(target):
    played = Played(target)
    sampling = Sampling(temperature=2.0)
    trees = [played.propose(sampling=sampling, uniform=u) for u in (0.02, 0.5, 0.97)]
    assert {tuple(chain(tree, COPIED)) for tree in trees} == {(4, 5, 6)}
    assert len({tuple(chain(tree, DRAFTED)) for tree in trees}) > 1


def test_rows_with_laws_of_their_own_keep_them_when_only_some_are_drafted(target):
    played = Played(target)
    laws = [Sampling(temperature=1.0), Sampling(temperature=0.5, top_k=3)]
    mixed = played.propose(sampling=SamplingRows.of(laws, torch.device("cpu")))
    alone = played.propose((DRAFTED,), sampling=laws[DRAFTED], drafter=played.hybrid.head)
    assert torch.allclose(mixed.law_probs[DRAFTED], alone.law_probs[0])


def test_both_keep_to_their_own_number_of_draft_tokens(target):
    played = Played(target)
    tree = played.propose(depth=8)
    assert len(chain(tree, COPIED)) > len(chain(tree, DRAFTED)) == 4


def test_a_copy_without_an_opinion_is_taken_at_its_word(target):
    tree = chain_of_points(torch.tensor([[1, 2, 3]]), torch.tensor([2]))
    assert promised_tokens(tree).tolist() == [2.0]
    played = Played(target, model_free="ngram")
    assert chain(played.propose(), COPIED) == [4, 5, 6]


# ---------------------------------------------------------------- merged laws


@pytest.mark.parametrize("support", [None, 5])
def test_merged_laws_are_laws_and_hold_their_tokens(support):
    vocab, width = 11, 3
    laws = torch.rand(1, 2, support or vocab, dtype=torch.float64)
    laws /= laws.sum(-1, keepdim=True)
    ids = None if support is None else torch.tensor([[[0, 10, 4, 7, 2], [1, 3, 5, 7, 9]]])
    drafts = DraftTree(
        torch.tensor([[10, 3]]),
        chain_parents(1, 2, torch.device("cpu")),
        torch.tensor([2]),
        laws,
        ids,
    )
    copies = chain_of_points(torch.tensor([[9, 10, 0], [1, 1, 1]]), torch.tensor([3, 1]))
    tree = merge_rows(copies, drafts, [1], vocab)
    assert tree.is_chain
    assert tree.num_nodes.tolist() == [3, 2]
    assert tree.tokens.tolist() == [[9, 10, 0], [10, 3, 0]]
    assert torch.allclose(tree.law_probs.sum(-1), torch.ones(2, width, dtype=torch.float64))
    full = torch.zeros(2, width, vocab, dtype=torch.float64)
    for row in range(2):
        for node in range(width):
            named = torch.arange(vocab) if tree.law_ids is None else tree.law_ids[row, node]
            assert named.unique().numel() == named.numel()
            full[row, node, named] += tree.law_probs[row, node]
    assert full[0].argmax(-1).tolist() == [9, 10, 0]
    assert full[0].max(-1).values.tolist() == [1.0] * 3
    named = torch.arange(vocab) if ids is None else ids[0, 1]
    assert torch.allclose(full[1, 1, named], laws[0, 1])


# ---------------------------------------------------------------- the law, exactly

SAMPLING = Sampling(temperature=2.0, top_k=6)


@pytest.fixture(scope="module")
def close_target():
    """A target whose skipped layer says little, so that p and the head's q overlap, and differ."""
    target = tiny_target()
    skipped = target.model.model.layers[1]
    skipped.self_attn.o_proj.weight.mul_(0.3)
    skipped.mlp.down_proj.weight.mul_(0.3)
    return target


def law_of_next_token(played, propose):
    """Law of the token after each anchor under speculative sampling, over all draws of the head.

    The head's draw takes every value of its support once, weighted by its probability; what
    follows is the rule itself: min(1, p/q) on the law the tree reports, else the residual.
    """
    found = torch.zeros_like(target_laws(played))
    q = process(head_logits(played), SAMPLING)[0]
    edges = torch.cat([torch.zeros(1, dtype=q.dtype), q.cumsum(0)])
    for token in q.nonzero().flatten().tolist():
        uniform = float((edges[token] + edges[token + 1]) / 2)
        tree = propose(uniform)
        for row, p in enumerate(target_laws(played)):
            found[row] += q[token] * one_node(tree, row, p)
    return found


def one_node(tree, row, p):
    if int(tree.num_nodes[row]) == 0:
        return p
    named = torch.arange(p.shape[0]) if tree.law_ids is None else tree.law_ids[row, 0]
    q = torch.zeros_like(p).index_add_(0, named, tree.law_probs[row, 0].to(p.dtype))
    token = int(tree.tokens[row, 0])
    accept = min(1.0, float(p[token] / q[token]))
    rest = residual(p, q)
    out = (1 - accept) * rest / rest.sum()
    out[token] += accept
    return out


def target_laws(played):
    anchors = torch.tensor([[REPEATS[-1]], [NEWS[-1]]])
    base = torch.tensor([len(REPEATS) - 1, len(NEWS) - 1])
    step = Step(torch.tensor([0, 1]), anchors, base, int(base.max()) + 1)
    return process(played.target.run(played.kv, step).logits[:, 0], SAMPLING)


def head_logits(played):
    step = Step(torch.tensor([1]), torch.tensor([[NEWS[-1]]]), torch.tensor([len(NEWS) - 1]), 6)
    view = played.target.view
    hidden = view.run_layers(played.kv, step, played.hybrid.head.layers)[:, 0]
    logits = view.head(view.final_norm(hidden))
    logits[:, view.spec.num_token_ids :] = -torch.inf
    return logits


def test_the_next_token_has_the_targets_law_whoever_drafted_it(close_target):
    played = Played(close_target, head_accepts=0.5)
    p, q = target_laws(played)[DRAFTED], process(head_logits(played), SAMPLING)[0]
    assert 0.1 < torch.minimum(p, q).sum() < 0.9

    def propose(uniform):
        return played.propose(depth=1, sampling=SAMPLING, uniform=uniform)

    found, expected = law_of_next_token(played, propose), target_laws(played)
    assert (found - expected).abs().max() < 1e-12


def test_choosing_after_a_look_at_the_drawn_token_changes_the_law(close_target):
    """The negative control: the head's row drafts nothing when it drew a token it finds unlikely."""
    played = Played(close_target, head_accepts=0.5)
    likeliest = int(process(head_logits(played), SAMPLING)[0].argmax())

    def propose(uniform):
        tree = played.propose(depth=1, sampling=SAMPLING, uniform=uniform)
        keeps = torch.tensor([1, int(tree.tokens[DRAFTED, 0]) == likeliest])
        return replace(tree, num_nodes=tree.num_nodes * keeps)

    found, expected = law_of_next_token(played, propose), target_laws(played)
    assert (found - expected)[COPIED].abs().max() < 1e-12
    assert (found - expected)[DRAFTED].abs().max() > 1e-2


# ---------------------------------------------------------------- heads with a folder


@pytest.fixture(scope="module")
def head_folder(target, tmp_path_factory):
    path = conf_dir() / "drafter" / "medusa.yaml"
    data = yaml.safe_load(path.read_text()) | {"num_draft_tokens": 3}
    head = build_drafter(parse_settings(drafter_class("medusa").settings_class, data), target.view)
    folder = tmp_path_factory.mktemp("head")
    save_drafter(head, folder, extra={})
    return folder


def test_a_trained_head_is_loaded_from_its_folder_and_left_alone(target, head_folder):
    hybrid = build_drafter(settings(head=str(head_folder)), target.view)
    assert isinstance(hybrid.head, Medusa)
    assert not any(parameter.requires_grad for parameter in hybrid.parameters())
    assert hybrid.needs == hybrid.head.needs


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "rule": "sampled_verify"}])
def test_a_hybrid_with_a_trained_head_says_what_the_target_says(target, head_folder, changes):
    data = yaml.safe_load((conf_dir() / "decode" / "greedy.yaml").read_text())
    data |= {"max_new_tokens": 20, "batch_size": 3, **changes}
    decode = parse_settings(DecodeSettings, data)
    prompts = [REPEATS, NEWS, NEWS + REPEATS, REPEATS[:4]]
    hybrid = build_drafter(settings(head=str(head_folder), head_accepts=0.5), target.view)
    hybrid = hybrid.to(target.dtype)
    expected = Decoder(target, None, decode).generate(prompts)
    found = Decoder(target, hybrid, decode).generate(prompts)
    assert [g.output_ids for g in found] == [g.output_ids for g in expected]


# ---------------------------------------------------------------- settings


def test_names_stand_for_settings_and_settings_survive_json():
    given = settings(model_free="suffix")
    assert isinstance(given.model_free, SuffixSettings)
    again = HybridSettings.model_validate(given.model_dump(mode="json"))
    assert again == given
    assert isinstance(again.model_free, SuffixSettings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_free": "self_speculative", "head": "medusa"}, "has to be trained"),
        ({"model_free": "medusa"}, "model_free=medusa has a network"),
        ({"head": "no/such/run"}, "drafter.head=no/such/run: expected a run or folder"),
        ({"model_free": {"kind": "suffix"}}, "drafter.model_free.max_match_tokens is required"),
        ({"head_accepts": -1}, "head_accepts=-1"),
    ],
)
def test_pairs_that_cannot_work_are_refused_in_words(target, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_drafter(settings(**changes), target.view)


def test_training_and_export_are_refused_with_what_to_do_instead(target):
    hybrid = Hybrid(settings(), target.view)
    with pytest.raises(NotExportable, match="draftlab export drafter=HEAD"):
        hybrid.serving_weights()
