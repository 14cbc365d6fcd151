"""Trees in the round, float64: every path, ragged batches, windows, what the drafter sees of it."""

import pytest
import torch
import yaml
from narrow import FALSE_ALARM, SAMPLING, exact_law, narrow_target, p_value
from scripted import Markov, Scripted, ScriptedTree, decode_settings, perfect

from draftlab.cli.schema import parse_drafter
from draftlab.decoding.costs import TimeCurve
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.plan import make_plan, static_tree
from draftlab.drafters.store import build_drafter
from draftlab.drafters.tree import DraftTree, StaticTree
from draftlab.errors import ConfigError
from draftlab.sampling import draw
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target

SHAPE = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [2, 0, 0], [2, 0, 1], [2, 0, 1, 0]]
TREE, DEPTH = static_tree(SHAPE)
PARENTS = TREE.parents
NODES = range(-1, len(PARENTS))


def settings_of_kind(kind):
    return parse_drafter(yaml.safe_load((conf_dir() / "drafter" / f"{kind}.yaml").read_text()))


def outputs(generations):
    return [g.output_ids for g in generations]


def ancestors(node):
    return [] if node < 0 else [*ancestors(PARENTS[node]), node]


def right_up_to(knows, node_of):
    """Grow the shape with true tokens on the way to `node_of(prefix)` and wrong ones elsewhere."""

    def script(prefix, depth):
        truth = knows(prefix, DEPTH)
        path = ancestors(node_of(prefix))
        nodes = []
        for n, parent in enumerate(PARENTS):
            level = len(ancestors(n)) - 1
            true = truth[level] if level < len(truth) else 0
            token = true if n in path else (true + 1 + n) % 250
            nodes.append((token, parent, 0.5))
        return nodes

    return script


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "tree.json"
    path.write_text(str(SHAPE))
    return decode_settings(tree={"kind": "static", "shape": str(path)}, max_new_tokens=14)


@pytest.fixture(scope="module")
def plain(target, prompts):
    return Decoder(target, None, decode_settings(max_new_tokens=14)).generate(prompts)


@pytest.fixture(scope="module")
def knows(prompts, plain):
    return perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})


@pytest.mark.parametrize("node", NODES)
def test_every_path_of_a_tree_gives_the_plain_answer(target, prompts, plain, knows, settings, node):
    drafter = ScriptedTree(right_up_to(knows, lambda prefix: node))
    got = Decoder(target, drafter, settings).generate(prompts[:3], batch_size=1)
    assert outputs(got) == outputs(plain)[:3]
    accepted = [s.num_accepted for g in got for s in g.steps[:-2]]
    assert set(accepted) == {len(ancestors(node))}


def test_rows_of_a_batch_may_accept_different_paths(target, prompts, plain, knows, settings):
    drafter = ScriptedTree(right_up_to(knows, lambda prefix: len(prefix) * 7 % len(PARENTS)))
    got = Decoder(target, drafter, settings).generate(prompts, batch_size=4)
    assert outputs(got) == outputs(plain)
    assert len({s.num_accepted for g in got for s in g.steps}) > 2


def test_the_drafter_sees_the_accepted_path_in_order(target, prompts, plain, knows, settings):
    drafter = ScriptedTree(right_up_to(knows, lambda prefix: 9))
    Decoder(target, drafter, settings).generate(prompts[3:4])
    ids, partners = [], []
    for seen in drafter.seen:
        ids += seen.ids[0, : int(seen.lengths[0])].tolist()
        partners += seen.next_ids[0, : int(seen.lengths[0])].tolist()
    whole = [*prompts[3], *plain[3].output_ids]
    shared = min(len(ids), len(whole) - 1)
    assert ids[:shared] == whole[:shared]
    assert partners[: shared - 1] == whole[1:shared]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_trees_are_exact_past_a_sliding_window(family, prompts, settings):
    target = tiny_target(family)
    plain = Decoder(target, None, settings).generate(prompts[2:5])
    script = perfect(
        {tuple(p): list(g.output_ids) for p, g in zip(prompts[2:5], plain, strict=True)}
    )
    for node in (3, 7, 9):
        drafter = ScriptedTree(right_up_to(script, lambda prefix, node=node: node))
        assert outputs(Decoder(target, drafter, settings).generate(prompts[2:5])) == outputs(plain)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_the_limit_holds_inside_a_path(target, prompts, plain, knows, settings, limit):
    drafter = ScriptedTree(right_up_to(knows, lambda prefix: 9))
    got = Decoder(target, drafter, settings).generate(prompts, max_new_tokens=limit)
    assert outputs(got) == [g.output_ids[:limit] for g in plain]


def test_sampled_verify_on_trees_gives_the_text_of_plain_sampling(target, prompts):
    sampled = {"temperature": 0.8, "seed": 3, "max_new_tokens": 10}
    plain = Decoder(target, None, decode_settings(**sampled)).generate(prompts)
    script = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})
    tree = {"kind": "dynamic", "num_nodes": len(PARENTS), "top_k": 3, "depth": DEPTH}
    settings = decode_settings(**sampled, rule="sampled_verify", tree=tree)
    for node in (2, 8, 9):
        drafter = ScriptedTree(right_up_to(script, lambda prefix, node=node: node))
        got = Decoder(target, drafter, settings).generate(prompts, batch_size=3)
        assert outputs(got) == outputs(plain)
        assert any(s.num_accepted for g in got for s in g.steps)


def test_a_tree_for_a_drafter_of_chains_is_refused(target, knows, settings):
    with pytest.raises(ConfigError, match="a scripted drafter proposes chains only"):
        Decoder(target, Scripted(knows), settings)


def test_a_chain_moves_no_keys_and_needs_no_mask(target, prompts, knows, monkeypatch):
    from draftlab.targets.cache import KVBuffers

    monkeypatch.setattr(KVBuffers, "compact", lambda *_: pytest.fail("a chain moved keys"))
    steps = []
    real = target.run
    monkeypatch.setattr(
        target, "run", lambda kv, step, **k: steps.append(step) or real(kv, step, **k)
    )
    Decoder(target, Scripted(knows), decode_settings()).generate(prompts[:2])
    assert all(step.ancestors is None and step.depths is None for step in steps)


# ---------------------------------------------------------------- sampling

SAMPLED = {"temperature": SAMPLING.temperature, "prefill_tokens": 8192, "batch_size": 500}
FORK = {"kind": "static", "shape": [2, 1]}  # nodes: two children, then one child of each


class MarkovTree(Markov, kind="markov_tree", settings=Markov.settings_class):
    """Draws the fork: siblings without replacement, each with the law it was drawn from."""

    grows_trees = True
    reports_first_law = staticmethod(lambda law: law)

    def propose(self, state, budget, uniforms):
        first_law = self.laws[state[budget.rows]]
        first = draw(first_law, uniforms[:, 0])
        left = first_law.scatter(1, first.unsqueeze(1), 0.0)
        second_law = left / left.sum(1, keepdim=True)
        second = draw(second_law, uniforms[:, 1])
        laws = [self.reports_first_law(first_law), second_law, self.laws[first], self.laws[second]]
        tokens = [first, second, *(draw(laws[n], uniforms[:, n]) for n in (2, 3))]
        law = torch.stack(laws, 1)
        rows = first.shape[0]
        return DraftTree(
            tokens=torch.stack(tokens, 1),
            parents=torch.tensor([-1, -1, 0, 1]).expand(rows, -1),
            num_nodes=torch.full((rows,), 4),
            law_probs=law,
            law_ids=torch.arange(law.shape[2]).expand(rows, 4, -1),
        )


@pytest.fixture(scope="module")
def narrow():
    return narrow_target()


@pytest.fixture(scope="module")
def law(narrow):
    return exact_law(narrow)


LAWS = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.3, 0.3, 0.2, 0.2], [0.05, 0.8, 0.1, 0.05], [0.1, 0.2, 0.3, 0.4]],
    dtype=torch.float64,
)


@pytest.mark.parametrize("rule", ["auto", "sampled_verify"])
def test_trees_drawn_without_replacement_keep_the_targets_law(narrow, law, rule):
    settings = decode_settings(**SAMPLED, tree=FORK, rule=rule)
    assert p_value(Decoder(narrow, MarkovTree(LAWS), settings), law) > FALSE_ALARM


def test_a_tree_that_reports_another_law_than_it_drew_from_does_not(narrow, law):
    drafter = MarkovTree(LAWS)
    drafter.reports_first_law = lambda first: torch.full_like(first, 0.25)
    settings = decode_settings(**SAMPLED, tree=FORK)
    assert p_value(Decoder(narrow, drafter, settings), law) < FALSE_ALARM


def test_budgeted_trees_of_likeliest_tokens_keep_the_targets_law(narrow, law):
    def script(prefix, depth):
        best = LAWS[prefix[-1]].topk(2)
        below = LAWS[best.indices[0]].topk(1)
        (a, b), (c,) = best.indices.tolist(), below.indices.tolist()
        (p, q), (r,) = best.values.tolist(), below.values.tolist()
        return [(a, -1, p), (b, -1, q), (c, 0, r)]

    tree = {"kind": "budgeted", "max_nodes": 3, "top_k": 2, "depth": 2}
    decoder = Decoder(narrow, ScriptedTree(script), decode_settings(**SAMPLED, tree=tree))
    decoder._curves[500] = TimeCurve((1, 2, 3, 4), (1.0, 1.2, 1.35, 1.6))
    assert p_value(decoder, law) > FALSE_ALARM


def test_a_measured_tree_is_what_the_drafter_counted_and_refused_where_it_counts_nothing():
    target = tiny_target()
    given = decode_settings(tree={"kind": "measured", "num_nodes": 3})
    kinds = [settings_of_kind(name) for name in ("medusa", "ngram")]
    medusa, ngram = (build_drafter(kind, target.view) for kind in kinds)
    with pytest.raises(ConfigError, match="no counts"):
        make_plan(given, medusa)
    medusa.rank_hits[:, -1] = 10
    medusa.rank_hits[:, 0] = 8
    medusa.rank_hits[0, 1] = 6
    plan = make_plan(given, medusa)
    assert (plan.depth, plan.num_nodes) == (2, 3)
    assert plan.shape == StaticTree((-1, -1, 0), (0, 1, 0))
    with pytest.raises(ConfigError, match="has not counted"):
        make_plan(given, ngram)
