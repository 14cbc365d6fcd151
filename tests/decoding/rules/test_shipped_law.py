"""The shipped rules, run beside every edge of every uniform: their output law is p to 1e-12."""

import itertools
from dataclasses import replace

import pytest
import torch
from exact_law import (
    CHAINS,
    SHAPES,
    TREES,
    Draft,
    Toy,
    all_drafts,
    block_edges,
    distance_from_target,
    emitted,
    output_laws,
    token_level_edges,
    whole_tree,
)

import draftlab.decoding.rules.block as block_rule
import draftlab.decoding.rules.chain as chain_rules
from draftlab.decoding.verify import verify_block, verify_exact_match, verify_speculative
from draftlab.sampling import Sampling, draw

TOLERANCE = 1e-12
PROCESSORS = {
    "plain": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.2, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "min-p": Sampling(temperature=1.0, min_p=0.3),
    "penalties": Sampling(
        temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3
    ),
    "bias and no early end": Sampling(temperature=1.0, logit_bias=((0, 1.5),), min_new_tokens=2),
    "a greedy row in a sampled batch": Sampling(),
}


def speculative(tree, probs, accept, following):
    return verify_speculative(tree, probs, accept_uniforms=accept, next_uniforms=following)


def block(tree, probs, accept, following):
    return verify_block(tree, probs, accept_uniforms=accept, next_uniforms=following)


RULES = {"speculative": (speculative, token_level_edges), "block": (block, block_edges)}


def draft_of(shape, law="drawn", lengths=()):
    """Three siblings need four ids; elsewhere three will do."""
    vocab = 4 if shape == "wide" else 3
    support = {"drawn from some ids": (3, 0, 1) if vocab == 4 else (2, 0)}.get(law)
    return Draft(SHAPES[shape], vocab, drawn=law != "points", support=support, lengths=lengths)


def distances(rule, draft, sampling, seed=3, **changes):
    toy = Toy(draft, sampling, seed)
    return [distance_from_target(toy, law) for law in output_laws(toy, *RULES[rule], **changes)]


ALL = [("speculative", shape) for shape in SHAPES] + [("block", shape) for shape in CHAINS]


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("rule", "shape"), ALL)
def test_every_rule_keeps_the_law_under_every_processor(rule, shape, processor):
    assert max(distances(rule, draft_of(shape), PROCESSORS[processor])) < TOLERANCE


@pytest.mark.parametrize("law", ["points", "drawn from some ids"])
@pytest.mark.parametrize("processor", ["plain", "top-p", "penalties"])
@pytest.mark.parametrize(("rule", "shape"), ALL)
def test_every_rule_keeps_the_law_with_laws_on_few_ids(rule, shape, processor, law):
    assert max(distances(rule, draft_of(shape, law), PROCESSORS[processor])) < TOLERANCE


@pytest.mark.parametrize(("rule", "shape"), ALL)
def test_every_rule_keeps_the_law_however_many_nodes_count(rule, shape):
    lengths = tuple(range(len(SHAPES[shape]) + 1))
    draft = draft_of(shape, "points" if shape in TREES else "drawn", lengths)
    assert max(distances(rule, draft, PROCESSORS["plain"])) < TOLERANCE


# ---------------------------------------------------------------- the target draws: sampled-verify


def sampled_verify_law(toy):
    """Compute the law over every draft and every choice of the target at every place."""
    drafts = all_drafts(toy)
    index, ids, masses = [], [], []
    for i, (mass, _, _, paths) in enumerate(drafts):
        laws = [toy.p(path).tolist() for path in paths]
        for choice in itertools.product(range(toy.draft.vocab), repeat=len(paths)):
            chance = mass
            for law, x in zip(laws, choice, strict=True):
                chance *= law[x]
            index.append(i)
            ids.append(choice)
            masses.append(chance)
    draft_of = torch.tensor(index)
    full = torch.full(draft_of.shape, len(toy.draft.parents))
    tree = whole_tree(toy.draft, drafts, draft_of, full)
    verdict = verify_exact_match(tree, torch.tensor(ids))
    weights = torch.tensor(masses, dtype=torch.float64)
    return emitted(toy, tree.tokens, verdict, weights, torch.zeros_like(draft_of), 1)[0]


@pytest.mark.parametrize(
    ("shape", "law"),
    [("chain of 2", "drawn"), ("chain of 3", "points"), ("wide", "drawn"), ("deep", "points")],
)
def test_sampled_verify_keeps_the_law(shape, law):
    toy = Toy(draft_of(shape, law), PROCESSORS["penalties"], seed=3)
    assert distance_from_target(toy, sampled_verify_law(toy)) < TOLERANCE


@pytest.mark.parametrize("shape", ["chain of 3", "deep"])
def test_sampled_verify_keyed_by_depth_is_plain_sampling_token_for_token(shape):
    toy = Toy(draft_of(shape, "points"), PROCESSORS["plain"], seed=3)
    drafts = all_drafts(toy)
    [(_, tokens, _, paths)] = drafts
    tree = whole_tree(toy.draft, drafts, torch.tensor([0]), torch.tensor([len(tokens)]))
    generator = torch.Generator().manual_seed(0)
    for uniforms in torch.rand(30, toy.draft.depth + 1, generator=generator, dtype=torch.float64):
        plain = ()
        for u in uniforms:
            plain += (int(draw(toy.p(plain), u)),)
        ids = [int(draw(toy.p(path), uniforms[len(path)])) for path in paths]
        verdict = verify_exact_match(tree, torch.tensor([ids]))
        out = [tokens[node] for node in verdict.path[0].tolist() if node >= 0]
        out.append(int(verdict.next_token))
        assert tuple(out) == plain[: len(out)]


# ---------------------------------------------------------------- draft lengths that adapt


def stop_where_the_drafter_is_unsure(toy, tokens, paths):
    """Cut before the first place where q has no likely token: told from the prefix alone."""
    unsure = [float(toy.q(path).max()) < 0.6 for path in paths[:-1]]
    return unsure.index(True) if True in unsure else len(tokens)


def drop_from_an_unlikely_token_on(toy, tokens, paths):
    """Broken: cut before the first drawn token that q finds unlikely, having seen it."""
    unlikely = [float(toy.q(path)[x]) < 0.4 for path, x in zip(paths, tokens, strict=False)]
    return unlikely.index(True) if True in unlikely else len(tokens)


@pytest.mark.parametrize("rule", RULES)
def test_a_length_told_from_the_prefix_keeps_the_law_and_one_told_from_the_token_does_not(rule):
    cuts = (stop_where_the_drafter_is_unsure, drop_from_an_unlikely_token_on)
    ours, anticipating = distances(
        rule, draft_of("chain of 3", lengths=cuts), PROCESSORS["plain"], seed=5
    )
    assert ours < TOLERANCE
    assert anticipating > 0.01


# ---------------------------------------------------------------- broken rules are seen


def seen(distance):
    return distance > 1e-3


@pytest.mark.parametrize(
    ("rule", "shape"),
    [("speculative", "chain of 1"), ("speculative", "chain of 3"), ("block", "chain of 3")],
)
def test_a_correction_from_p_itself_is_seen(rule, shape, monkeypatch):
    monkeypatch.setattr(chain_rules, "residual", lambda p, q: p)
    assert seen(distances(rule, draft_of(shape), PROCESSORS["plain"])[0])


def test_an_unscaled_residual_in_block_verification_is_seen(monkeypatch):
    right = chain_rules.draw_after_chain
    monkeypatch.setattr(
        block_rule, "draw_after_chain", lambda *arguments: right(*arguments[:4], scale=None)
    )
    assert seen(distances("block", draft_of("chain of 3"), PROCESSORS["plain"])[0])


def test_siblings_that_forget_each_other_are_seen():
    def forget(tree):
        return replace(tree, law_probs=tree.law_probs[:, :1].expand_as(tree.law_probs))

    found = distances("speculative", draft_of("wide"), PROCESSORS["plain"], judged=forget)
    assert seen(found[0])


def test_the_likeliest_tokens_judged_as_if_drawn_are_seen():
    draft = draft_of("wide", "points")
    q = Toy(draft, PROCESSORS["plain"], 3).q(())

    def judged_as_drawn(tree):
        laws = q.expand(*tree.tokens.shape, -1).clone()
        laws[:, 1:].scatter_(2, tree.tokens[:, :-1].unsqueeze(2), 0.0)
        laws[:, 2:].scatter_(2, tree.tokens[:, :-2].unsqueeze(2), 0.0)
        return replace(tree, law_probs=laws / laws.sum(2, keepdim=True), law_ids=None)

    found = distances("speculative", draft, PROCESSORS["plain"], judged=judged_as_drawn)
    assert seen(found[0])


BROKEN = {
    "the processors are forgotten": lambda tree, probs, accept, following: speculative(
        tree, probs.sqrt() / probs.sqrt().sum(2, keepdim=True), accept, following
    ),
    "one uniform serves twice": lambda tree, probs, accept, following: speculative(
        tree, probs, accept, accept[:, 0]
    ),
    "every node is judged by the anchor's row": lambda tree, probs, accept, following: speculative(
        tree, probs[:, :1].expand_as(probs), accept, following
    ),
}


@pytest.mark.parametrize("slip", BROKEN)
@pytest.mark.parametrize("shape", ["chain of 3", "deep"])
def test_a_slip_of_the_caller_is_seen(slip, shape):
    toy = Toy(draft_of(shape), PROCESSORS["plain"], 3)
    [law] = output_laws(toy, BROKEN[slip], token_level_edges)
    assert seen(distance_from_target(toy, law))
