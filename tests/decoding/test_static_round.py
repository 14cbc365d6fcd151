"""Rounds on the device alone, run eagerly here: the ordinary decoder's tokens, and no sync."""

from dataclasses import replace

import pytest
import torch
from scripted import FakeClock, Scripted, ScriptedSettings, decode_settings
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.graphs import StaticRunner, refuse_graphs, refuse_rows, wants_graphs
from draftlab.decoding.plan import make_plan
from draftlab.decoding.requests import make_rows
from draftlab.decoding.static_round import StaticRound
from draftlab.decoding.timing import DeviceClock
from draftlab.drafters._static import AlreadyStatic
from draftlab.drafters.base import Drafter, drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.drafters.tree import chain_of_points
from draftlab.errors import ConfigError, DraftlabError
from draftlab.settings.base import parse_settings
from draftlab.settings.compose import compose
from draftlab.targets.features import FeatureRequest
from draftlab.targets.load import choose_kernels
from draftlab.targets.tiny import tiny_target

SAMPLED = {"temperature": 0.9}


class Trigram(Drafter, kind="trigram", settings=ScriptedSettings):
    """Says what followed the two newest tokens in some text: often right, sometimes not."""

    def __init__(self, follows, num_draft_tokens=4):
        super().__init__()
        self.settings = ScriptedSettings(kind="trigram", num_draft_tokens=num_draft_tokens)
        self.follows = follows

    @property
    def needs(self):
        return FeatureRequest()

    def forward(self, batch, features, noise):
        raise NotImplementedError

    def open(self, slots, capacity, kv):
        return torch.zeros(slots, 2, dtype=torch.int64)

    def observe(self, state, seen):
        last = (seen.lengths - 1).clamp_min(0).unsqueeze(1)
        newest = torch.cat([seen.ids.gather(1, last), seen.next_ids.gather(1, last)], dim=1)
        has_any = (seen.lengths > 0).unsqueeze(1)
        state[seen.rows] = torch.where(has_any, newest, state[seen.rows])

    def propose(self, state, budget, uniforms):
        before, newest = state[budget.rows].unbind(1)
        if budget.tree is not None:
            return self._second_branch(before, newest)
        tokens = []
        for _ in range(budget.num_draft_tokens):
            before, newest = newest, self.follows[before, newest]
            tokens.append(newest)
        return chain_of_points(torch.stack(tokens, dim=1))

    def _second_branch(self, before, newest):
        """Fill the shape [2, 1, 1]: what it would say goes down the second branch."""
        first = self.follows[before, newest]
        second = self.follows[newest, first]
        third = self.follows[first, second]
        other = (first + 1) % self.follows.shape[0]
        tokens = torch.stack([other, first, second * 0, second, third * 0, third], dim=1)
        parents = torch.tensor([-1, -1, 0, 1, 2, 3]).expand_as(tokens)
        return replace(chain_of_points(tokens), parents=parents)

    def close(self, state, rows):
        state[rows] = 0

    def static_rounds(self):
        return AlreadyStatic(self)


DYNAMIC = {"tree": {"kind": "dynamic", "num_nodes": 7, "top_k": 3, "depth": 3}}
SECOND_BRANCH = {"kind": "static", "shape": [2, 1, 1]}
RULES_OF_TREES = ("point_mass", "sampled_verify")
STATIC = {"tree": {"kind": "static", "shape": [3, 2, 1]}}
CHAINS = {
    "plain": None,
    "eagle3": {"kind": "eagle3"},
    "eagle3-reduced": {"kind": "eagle3", "draft_vocab_size": 120, "sliding_window": 6},
    "eagle": {"kind": "eagle"},
    "mtp": {"kind": "mtp"},
    "medusa": {"kind": "medusa"},
}
TREES = [
    (name, words)
    for name in ("eagle3", "eagle3-reduced", "eagle", "mtp", "medusa")
    for words in (DYNAMIC, STATIC)
]


PROMPTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (5, 1, 17, 30, 9)
]


@pytest.fixture(scope="module")
def prompts():
    return PROMPTS


@pytest.fixture(scope="module")
def fast():
    target = tiny_target("llama", num_hidden_layers=3)
    choose_kernels(target, "fast")
    return target


def drafter_of(name, target):
    words = CHAINS[name]
    if words is None:
        return None
    data = compose("train", [f"drafter={words['kind']}"]).data["drafter"] | words
    settings = parse_settings(drafter_class(words["kind"]).settings_class, data)
    counts = torch.arange(target.spec.vocab_size) if "draft_vocab_size" in words else None
    return build_drafter(settings, target.view, counts).to(target.dtype).eval()


def trigram_of(target, prompts, settings):
    """Build a drafter from the answers themselves, wrong at a few places of each."""
    follows = torch.zeros(target.spec.vocab_size, target.spec.vocab_size, dtype=torch.int64)
    for answer in Decoder(target, None, settings).generate(prompts):
        ids = [*answer.prompt_ids[-2:], *answer.output_ids]
        for place in range(2, len(ids)):
            wrong = place in (4, 5, 8, 13, 15)
            follows[ids[place - 2], ids[place - 1]] = 0 if wrong else ids[place]
    return Trigram(follows)


def runner_of(target, drafter, settings, *, clock=None, **choices):
    eos = frozenset() if settings.ignore_eos else frozenset(target.spec.eos_ids)
    return StaticRunner(
        target,
        drafter,
        settings,
        make_plan(settings, drafter),
        clock=clock or DeviceClock(target.device),
        eos_ids=eos,
        captures=False,
        **choices,
    )


def answers_of(runner, target, drafter, settings, prompts, *, limits, batch_size, on_tokens=None):
    rows = make_rows(
        target,
        prompts,
        sampling=settings.sampling,
        max_new_tokens=limits,
        stops=None,
        row_keys=None,
    )
    rule = Decoder(target, drafter, settings)._judge.rule
    assert refuse_rows(rows) is None
    found = list(runner.run(rows, batch_size, on_tokens, rule))
    return sorted(found, key=lambda answer: answer.prompt_index)


def compared(target, drafter, prompts, *, batch_size=3, limits=None, rounds=4, **words):
    settings = decode_settings(**words)
    limits = limits or [12, 5, 20, 1, 9][: len(prompts)]
    expected = Decoder(target, drafter, settings).generate(
        prompts, max_new_tokens=limits, batch_size=batch_size
    )
    runner = runner_of(target, drafter, settings, rounds=rounds)
    found = answers_of(
        runner, target, drafter, settings, prompts, limits=limits, batch_size=batch_size
    )
    return expected, found


def facts(answers):
    return [
        (
            answer.output_ids,
            answer.finish,
            [(s.num_drafted, s.num_accepted, s.num_emitted) for s in answer.steps],
        )
        for answer in answers
    ]


@pytest.mark.parametrize("name", CHAINS)
def test_greedy_tokens_and_steps_are_those_of_the_ordinary_decoder(name, fast, prompts):
    expected, found = compared(fast, drafter_of(name, fast), prompts)
    assert facts(found) == facts(expected)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(("eagle3", rule) for rule in ("speculative", "block", "point_mass", "sampled_verify")),
        ("eagle3-reduced", "block"),
        ("medusa", "speculative"),
        ("mtp", "speculative"),
    ],
)
def test_drawn_tokens_are_those_of_the_ordinary_decoder(name, rule, fast, prompts):
    expected, found = compared(fast, drafter_of(name, fast), prompts, rule=rule, **SAMPLED)
    assert facts(found) == facts(expected)


@pytest.mark.parametrize(("name", "tree"), TREES)
def test_greedy_trees_are_those_of_the_ordinary_decoder(name, tree, fast, prompts):
    expected, found = compared(fast, drafter_of(name, fast), prompts, **tree)
    assert facts(found) == facts(expected)
    assert any(step.num_drafted > 4 for answer in found for step in answer.steps)


@pytest.mark.parametrize("name", ["eagle3", "eagle3-reduced", "medusa"])
@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        ("point_mass", DYNAMIC),
        ("sampled_verify", DYNAMIC),
        ("sampled_verify", STATIC),
        ("without_replacement", STATIC),
        ("speculative", STATIC),
    ],
)
def test_drawn_trees_are_those_of_the_ordinary_decoder(name, rule, tree, fast, prompts):
    expected, found = compared(fast, drafter_of(name, fast), prompts, rule=rule, **SAMPLED, **tree)
    assert facts(found) == facts(expected)


@pytest.mark.parametrize("words", [{}, *({"rule": r, **SAMPLED} for r in RULES_OF_TREES)])
@pytest.mark.parametrize("sizes", [(24, 2, 3), (9, 1, 2), (2, 3, 4)])
def test_a_dynamic_tree_may_have_fewer_nodes_than_it_may(sizes, words, fast, prompts):
    tree = dict(zip(("num_nodes", "top_k", "depth"), sizes, strict=True), kind="dynamic")
    expected, found = compared(fast, drafter_of("eagle3", fast), prompts, tree=tree, **words)
    assert facts(found) == facts(expected)


def test_a_row_that_ends_inside_a_tree_never_leaves_its_memory(fast, monkeypatch):
    monkeypatch.setattr("draftlab.decoding.graphs._SMALLEST_BUCKET", 32)
    run, most = StaticRound.run, []

    def watched(self, live):
        most.append(int(self.facts.base.max()) + self._num_nodes - self._kv.capacity)
        run(self, live)

    monkeypatch.setattr(StaticRound, "run", watched)
    for length in range(4, 10):
        prompts = [PROMPTS[3][:length]]
        drafter = trigram_of(fast, prompts, decode_settings())
        drafter.grows_trees = True
        expected, found = compared(
            fast, drafter, prompts, limits=[25 - length], rounds=6, tree=SECOND_BRANCH
        )
        assert facts(found) == facts(expected)
    assert max(most) < 0


@pytest.mark.parametrize("shape", [[6, 2], [2, 1, 1]])
def test_no_node_lies_past_what_a_round_looks_at(shape, fast, prompts, monkeypatch):
    # sizes that are rounded up would hide a bound that is too low
    monkeypatch.setattr("draftlab.decoding.graphs._bucket", lambda length: length)
    run, most = StaticRound.run, []

    def watched(self, live):
        is_live = ~self.facts.is_done
        most.append(int((self.facts.base * is_live).max()) + self._num_nodes + 1 - live)
        run(self, live)

    monkeypatch.setattr(StaticRound, "run", watched)
    tree = {"kind": "static", "shape": shape}
    expected, found = compared(fast, drafter_of("eagle3", fast), prompts, tree=tree)
    assert facts(found) == facts(expected)
    assert max(most) <= 0


def test_an_accepted_path_off_the_first_branch_is_moved_together(fast):
    prompts = [PROMPTS[k % 5] + [k] for k in range(8)]
    drafter = trigram_of(fast, prompts, decode_settings())
    drafter.grows_trees = True
    expected, found = compared(
        fast, drafter, prompts, limits=[24] * 8, batch_size=4, tree=SECOND_BRANCH
    )
    assert facts(found) == facts(expected)
    assert {0, 1, 3} <= {step.num_accepted for answer in found for step in answer.steps}


@pytest.mark.parametrize("words", [{}, {"rule": "sampled_verify", **SAMPLED}])
def test_every_number_of_accepted_tokens_is_committed_alike(words, fast):
    prompts = [PROMPTS[k % 5] + [k] for k in range(8)]
    drafter = trigram_of(fast, prompts, decode_settings(**words))
    expected, found = compared(fast, drafter, prompts, limits=[24] * 8, batch_size=4, **words)
    assert facts(found) == facts(expected)
    assert {0, 1, 4} < {step.num_accepted for answer in found for step in answer.steps}


def test_plain_draws_do_not_depend_on_where_the_host_looks(fast, prompts):
    expected, found = compared(fast, None, prompts, rounds=7, **SAMPLED)
    assert facts(found) == facts(expected)


@pytest.mark.parametrize("words", [{}, {"tree": SECOND_BRANCH}])
def test_an_end_token_ends_an_answer_inside_an_accepted_run(words, fast, monkeypatch):
    drafter = trigram_of(fast, PROMPTS[:2], decode_settings())
    drafter.grows_trees = True
    (free,) = Decoder(fast, None, decode_settings()).generate(PROMPTS[:1], max_new_tokens=20)
    were_inside, spec = [], fast.spec
    for place in range(7, 12):
        # a token of the answer itself, so that it surely comes
        monkeypatch.setattr(fast, "spec", replace(spec, eos_ids=(free.output_ids[place],)))
        expected, found = compared(
            fast, drafter, PROMPTS[:2], limits=[20] * 2, ignore_eos=False, **words
        )
        assert facts(found) == facts(expected)
        assert found[0].finish == "eos"
        last = found[0].steps[-1]
        were_inside.append(last.num_emitted <= last.num_accepted)
    assert any(were_inside)


@pytest.mark.parametrize("words", [{}, DYNAMIC])
def test_memory_of_an_earlier_call_leaves_no_trace(words, fast, prompts):
    settings = decode_settings(**words)
    drafter = drafter_of("eagle3", fast)
    runner = runner_of(fast, drafter, settings)
    expected = facts(Decoder(fast, drafter, settings).generate(prompts[:3], max_new_tokens=6))
    kept = set()
    for _ in range(2):
        found = answers_of(runner, fast, drafter, settings, prompts[:3], limits=6, batch_size=2)
        assert facts(found) == expected
        (session,) = runner._sessions.values()
        memory = session.batch.state.kv
        kept.add(id(memory))
    assert len(kept) == 1  # captured rounds hold on to it


@pytest.mark.parametrize("words", [{}, DYNAMIC, {"tree": {"kind": "static", "shape": [6, 2]}}])
def test_lengths_may_cross_buckets(words, fast, prompts, monkeypatch):
    monkeypatch.setattr("draftlab.decoding.graphs._SMALLEST_BUCKET", 8)
    drafter = drafter_of("eagle3", fast)
    expected, found = compared(
        fast, drafter, prompts[:3], limits=[14, 20, 3], batch_size=3, **words
    )
    assert facts(found) == facts(expected)


@pytest.mark.parametrize("words", [{}, DYNAMIC, STATIC])
def test_the_end_of_the_targets_positions_is_reached(words, prompts):
    target = tiny_target("llama", num_hidden_layers=1, max_position_embeddings=40)
    choose_kernels(target, "fast")
    expected, found = compared(
        target, drafter_of("medusa", target), prompts, limits=[99] * 5, **words
    )
    assert facts(found) == facts(expected)
    assert len(found[3].output_ids) == 10


def test_tokens_are_told_round_by_round(fast, prompts):
    told = []
    settings = decode_settings()
    found = answers_of(
        runner_of(fast, None, settings),
        fast,
        None,
        settings,
        prompts[:1],
        limits=7,
        batch_size=1,
        on_tokens=lambda index, tokens, accepted: told.append((index, tokens, accepted)),
    )
    assert told == [(0, [token], 0) for token in found[0].output_ids]


def timed_answers(target, drafter, monkeypatch, prompts, limits, **words):
    """Answers on a clock that only the target's passes in rounds move, one second each."""
    clock, run, settings = FakeClock(), target.run, decode_settings(**words)

    def timed_run(kv, step, *, wants_logits=True, **rest):
        clock.pass_time(float(wants_logits))
        return run(kv, step, wants_logits=wants_logits, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(target, "run", timed_run)
        runner = runner_of(target, drafter, settings, clock=clock, rounds=6)
        sizes = {"limits": limits, "batch_size": len(prompts)}
        found = answers_of(runner, target, drafter, settings, prompts, **sizes)
    return found, clock.seconds


@pytest.mark.parametrize("drafts", [False, True])
def test_an_answers_time_ends_with_its_own_last_round(drafts, fast, prompts, monkeypatch):
    drafter = trigram_of(fast, prompts, decode_settings()) if drafts else None
    found, _ = timed_answers(fast, drafter, monkeypatch, prompts[:4], [20, 3, 9, 1])
    assert [a.decode_s for a in found] == pytest.approx([len(a.steps) for a in found])
    assert all(step.verify_s == pytest.approx(1.0) for a in found for step in a.steps)


def test_an_end_token_ends_an_answers_time_too(fast, prompts, monkeypatch):
    (free,) = Decoder(fast, None, decode_settings()).generate(prompts[:1], max_new_tokens=9)
    monkeypatch.setattr(fast, "spec", replace(fast.spec, eos_ids=(free.output_ids[8],)))
    (found,), _ = timed_answers(fast, None, monkeypatch, prompts[:1], [50], ignore_eos=False)
    assert found.finish == "eos"
    assert found.decode_s == pytest.approx(len(found.steps))


def test_no_more_rounds_run_than_rows_have_room(fast, prompts, monkeypatch):
    _, spent = timed_answers(fast, None, monkeypatch, prompts[:2], [20, 3])
    assert spent == 20


def test_a_step_is_shared_by_the_rows_that_have_not_ended(fast, prompts, monkeypatch):
    found, spent = timed_answers(fast, None, monkeypatch, prompts[:3], [20, 3, 9])
    assert [s.batch_live for s in found[0].steps] == [3] * 2 + [2] * 6 + [1] * 11
    steps = [step for answer in found for step in answer.steps]
    assert sum(s.verify_s / s.batch_live for s in steps) == pytest.approx(spent - 1)


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device, or copies a number to it."""

    words = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "lift_fresh")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        picked = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        has_mask = any(index is not None and index.dtype is torch.bool for index in picked)
        waits = has_mask or name in self.words
        assert not waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class NothingOfTheHost(TorchFunctionMode):
    """Refuses numbers and lists that CUDA would copy and wait for, and copies to the host.

    `where` and item assignment with a number, and indexing with a list, make a tensor of it.
    """

    to_host = (*(getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")), torch.tensor)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        numbers = []
        if func in (torch.where, torch.Tensor.where):
            numbers = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, float | int)]
        if func is torch.Tensor.__setitem__ and isinstance(args[2], float | int):
            numbers = [args[2]]
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            numbers += [x for x in index if isinstance(x, list | range)]
        assert not numbers, f"{func.__name__} with {numbers}"
        assert func not in self.to_host, f"{func.__name__} waits"
        return func(*args, **(kwargs or {}))


NEVER_WAITING = [
    *((name, words) for name in CHAINS for words in ({}, {"rule": "block", **SAMPLED})),
    *((name, tree) for name, tree in TREES if name != "eagle"),
    ("eagle3", {"rule": "point_mass", **SAMPLED, **DYNAMIC}),
    ("eagle3", {"rule": "without_replacement", **SAMPLED, **STATIC}),
    ("eagle3-reduced", {"rule": "without_replacement", "top_p": 0.9, **SAMPLED, **STATIC}),
    ("eagle", {"rule": "sampled_verify", "top_k": 20, **SAMPLED, **DYNAMIC}),
    ("medusa", {"rule": "sampled_verify", **SAMPLED, **STATIC}),
]


@pytest.mark.parametrize(("name", "words"), NEVER_WAITING)
def test_a_round_never_waits_for_the_device(name, words, fast, prompts, monkeypatch):
    if CHAINS[name] is None and words:
        words = SAMPLED
    # what is asked of a mask on a CPU is not asked elsewhere
    for rules in ("deepest", "speculative"):
        monkeypatch.setattr(f"draftlab.decoding.rules.{rules}.may_hold", lambda mask: True)
    drafter = drafter_of(name, fast)
    settings = decode_settings(**words)
    runner = runner_of(fast, drafter, settings)
    run, seen = StaticRound.run, []

    def guarded(self, live):
        if seen:  # laws are made into tensors once, before any capture
            with NoSync(), NothingOfTheHost():
                run(self, live)
        else:
            run(self, live)
        seen.append(live)

    monkeypatch.setattr(StaticRound, "run", guarded)
    answers_of(runner, fast, drafter, settings, prompts[:2], limits=6, batch_size=2)
    assert len(seen) > 2


def test_the_guard_finds_a_sync():
    with pytest.raises(AssertionError, match="waits"), NoSync():
        bool(torch.ones(1) > 0)
    with pytest.raises(AssertionError, match="waits"), NoSync():
        torch.ones(2)[torch.ones(2) > 0]
    ones = torch.ones(2)
    with pytest.raises(AssertionError, match="where with"), NothingOfTheHost():
        torch.where(ones > 0, ones, 0)
    with pytest.raises(AssertionError, match="getitem"), NothingOfTheHost():
        ones[[0, 1]]
    with pytest.raises(AssertionError, match="setitem"), NothingOfTheHost():
        ones[0] = 0
    with pytest.raises(AssertionError, match="tolist"), NothingOfTheHost():
        ones.tolist()


def test_rounds_that_give_nothing_end_with_an_error(fast, prompts, monkeypatch):
    monkeypatch.setattr(StaticRound, "run", lambda self, live: None)
    settings = decode_settings()
    runner = runner_of(fast, None, settings)
    with pytest.raises(DraftlabError, match=r"gave no token.*decode\.graphs=off"):
        answers_of(runner, fast, None, settings, prompts[:1], limits=3, batch_size=1)


def test_graphs_forced_on_a_cpu_are_refused_with_the_reason(fast):
    with pytest.raises(ConfigError, match=r"decode\.graphs=on cannot take effect: the target"):
        Decoder(fast, None, decode_settings(graphs="on"))


def test_auto_keeps_to_the_ordinary_rounds_on_a_cpu(fast):
    settings = decode_settings()
    assert not wants_graphs(fast, None, settings, make_plan(settings, None), has_listener=False)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"tree": {"kind": "budgeted", "max_nodes": 8, "top_k": 2, "depth": 2}}, "chosen anew"),
        ({"fallback": True}, "clock"),
        ({"min_confidence": 0.5}, "chosen anew"),
    ],
)
def test_what_needs_the_host_is_told(words, reason, fast):
    drafter = drafter_of("medusa", fast)
    settings = decode_settings(**words)
    assert reason in refuse_graphs(fast, drafter, settings, make_plan(settings, drafter))


def test_a_drafter_of_the_host_is_told(fast):
    settings, drafter = decode_settings(), Scripted(lambda prefix, depth: [])
    assert "scripted" in refuse_graphs(fast, drafter, settings, make_plan(settings, drafter))
