"""Draft models: where they start, what they learn, how they keep up, what they hand out."""

import shutil

import pytest
import torch
import yaml
from torch.nn import functional as F
from transformers import AutoTokenizer

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import DraftBudget, Observation, drafter_class
from draftlab.drafters.draft_model import DraftModel, DraftModelSettings
from draftlab.drafters.store import load_drafter, save_drafter
from draftlab.errors import ConfigError, TargetMismatch
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets import adapter, packed_attention
from draftlab.targets.attention import attend, tile_mask
from draftlab.targets.step import Step
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

K = 3


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(**changes):
    data = {
        "kind": "draft_model",
        "num_draft_tokens": K,
        "start": "layers",
        "model": None,
        "revision": None,
        "layers": None,
        "trainable": "all",
        "objective": "forward_kl",
        "reference": None,
        "learn_fraction": None,
        "normalise": "sequence",
    }
    return parse_settings(DraftModelSettings, data | changes)


def build(target, **changes):
    return DraftModel(settings(**changes), target.view).to(target.dtype).eval()


def folder_with(tmp_path, family="llama", tokenizer=None, **sizes):
    build_tiny_model(family, torch.float32, seed=1, **sizes).save_pretrained(tmp_path)
    (tokenizer or tiny_tokenizer()).save_pretrained(tmp_path)
    return {"start": "pretrained", "model": str(tmp_path)}


def drafts_after(drafter, target, ids, capacity=512):
    """Show all ids but the last, which is the anchor; propose greedily."""
    state = drafter.open(1, capacity, target.open_kv(1, 4))
    seen = Observation(
        rows=torch.tensor([0]),
        ids=torch.tensor([ids[:-1]]),
        lengths=torch.tensor([len(ids) - 1]),
        next_ids=torch.tensor([ids[1:]]),
        taps=None,
        final=torch.zeros(1, len(ids) - 1, 64, dtype=target.dtype),
    )
    drafter.observe(state, seen)
    budget = DraftBudget(torch.tensor([0]), K, GREEDY)
    tree = drafter.propose(state, budget, torch.zeros(1, K, dtype=torch.float64))
    return tree.tokens[0, : int(tree.num_nodes[0])].tolist()


def random_ids(count, seed=0):
    return torch.randint(200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def greedy_continuation(model, ids, count, known):
    ids = list(ids)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, :known]
        ids.append(int(logits.argmax()))
    return ids[-count:]


def plain_model(drafter):
    """The drafter's weights in a model that has nothing of draftlab in it."""
    return drafter.plain_model()


def test_all_layers_of_the_target_make_the_target(target):
    drafter = build(target, layers=[0, 1, 2, 3])
    ids = torch.tensor([random_ids(9)])
    target.reference.detach()
    try:
        with torch.no_grad():
            expected = target.model(input_ids=ids, use_cache=False).logits
    finally:
        target.reference.attach()
    with torch.no_grad():
        got = plain_model(drafter)(input_ids=ids, use_cache=False).logits
    assert torch.allclose(got, expected, atol=1e-3)  # its weights were float32 once


def test_by_default_a_quarter_of_the_layers_is_taken_with_both_ends(target):
    drafter = build(target)
    theirs = drafter.model.get_submodule("model.layers.1").state_dict()
    last = target.view.layer_state(3)
    assert len(drafter.model.get_submodule("model.layers")) == 2
    assert all(torch.equal(theirs[name], last[name].float().double()) for name in last)


@pytest.mark.parametrize("length", [2, 64, 65, 66, 140, 200])
def test_drafts_are_the_models_own_greedy_continuation_whatever_the_prompts_length(target, length):
    drafter = build(target)
    ids = random_ids(length)
    expected = greedy_continuation(plain_model(drafter), ids, K, target.spec.num_token_ids)
    assert drafts_after(drafter, target, ids) == expected


def test_rows_past_the_models_own_length_draft_nothing(target, tmp_path):
    drafter = build(target, **folder_with(tmp_path, max_position_embeddings=20))
    assert len(drafts_after(drafter, target, random_ids(20 - K + 1))) == K
    assert drafts_after(drafter, target, random_ids(20 - K + 2)) == []
    assert drafts_after(drafter, target, random_ids(150)) == []


def test_the_loss_is_the_mean_divergence_of_the_two_laws_at_the_same_positions(target):
    drafter = build(target)
    ids = torch.tensor([random_ids(12)])
    place = torch.arange(12).unsqueeze(0)
    batch = TokenBatch(ids, place >= 5, place, torch.zeros_like(place), torch.zeros_like(place))
    features = target.read_features(batch, drafter.needs)
    got = drafter(batch, features, Noise(0))
    with torch.no_grad():
        draft = plain_model(drafter)(input_ids=ids, use_cache=False).logits[0, 4:11]
    teacher = target.view.head(features.final[0, 4:11])
    scores = score_rows(objective("forward_kl"), teacher, draft, ids[0, 5:])
    assert got.total.item() == pytest.approx(scores.loss.mean().item(), rel=1e-5)
    assert got.count.tolist() == [7]
    assert got.hit_sum.tolist() == [int(scores.hit.sum())]


@pytest.mark.parametrize("rows", [261, 300, 384])
def test_padded_vocabularies_of_other_sizes_train_and_draft(target, tmp_path, rows):
    drafter = build(target, **folder_with(tmp_path, vocab_size=rows))
    place = torch.arange(12).unsqueeze(0)
    zeros = torch.zeros_like(place)
    batch = TokenBatch(torch.tensor([random_ids(12)]), place >= 5, place, zeros, zeros)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert loss.total.isfinite()
    assert drafter.model.get_parameter("lm_head.weight").grad.abs().sum() > 0
    assert all(t < target.spec.num_token_ids for t in drafts_after(drafter, target, random_ids(9)))


def test_only_layers_leaves_embedding_norm_and_head_as_they_are(target):
    drafter = build(target, trainable="layers")
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("model.model.layers.") for name in trained)


def test_an_exported_folder_is_a_whole_model_and_replaces_an_older_one(target, tmp_path):
    drafter = build(target)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("x")
    drafter.save_pretrained_folder(tmp_path / "out")
    assert not (tmp_path / "out" / "old").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tiny_tokenizer().get_vocab()
    )
    again = build(target, start="pretrained", model=str(tmp_path / "out"))
    ids = random_ids(9)
    assert drafts_after(again, target, ids) == drafts_after(drafter, target, ids)
    weights = drafter.serving_weights()
    assert weights.config["num_hidden_layers"] == 2
    assert set(weights.tensors) == set(again.model.state_dict())


def test_casting_keeps_the_rotary_table_in_float32(target):
    drafter = build(target)
    before = drafter.model.get_buffer("model.rotary_emb.inv_freq").clone()
    drafter.to(torch.bfloat16)
    assert drafter.model.get_parameter("lm_head.weight").dtype == torch.bfloat16
    after = drafter.model.get_buffer("model.rotary_emb.inv_freq")
    assert after.dtype == torch.float32
    assert torch.equal(before, after)


def test_another_tokenizer_is_refused(target, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<swap>"])
    other = folder_with(tmp_path, tokenizer=tokenizer)
    build(target, **other)  # more tokens than the target knows do no harm
    theirs = tiny_target()
    theirs.view.tokenizer.add_tokens(["<mine>"])
    with pytest.raises(TargetMismatch, match=r"different tokenizers: 1 tokens .* '<mine>'"):
        build(theirs, **other)


def test_too_few_rows_for_the_ids_are_refused(target, tmp_path):
    with pytest.raises(TargetMismatch, match="has 260 rows for the 261 token ids"):
        build(target, **folder_with(tmp_path, vocab_size=260))


def test_a_missing_model_is_one_clear_error(target, tmp_path):
    with pytest.raises(ConfigError, match="cannot load draft model"):
        build(target, start="pretrained", model=str(tmp_path / "nowhere"))


def test_layers_of_other_families_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"is gpt2; pass start=pretrained"):
        build(tiny_target("gpt2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [1, 0]}, r"layers=\[1, 0\]: expected ascending"),
        ({"layers": [0, 4]}, r"distinct numbers in 0\.\.3"),
        ({"model": "x"}, "model=x with start=layers"),
        ({"start": "pretrained"}, "model=None with start=pretrained"),
        ({"revision": "v1"}, "revision=v1 has no effect"),
        ({"objective": "kl"}, "objective='kl'"),
        ({"reference": "start"}, "reference=start with learn_fraction=None"),
        ({"learn_fraction": 0.4}, "reference=None with learn_fraction=0.4"),
        ({"reference": "start", "learn_fraction": 1.5}, "learn_fraction"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(target, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(target, **changes)


# ---------------------------------------------------------------- packed rows


class ByOneMask:
    """`PackedAttention` by a dense mask; can be made to see one token of the sample before."""

    sees_before = False

    def __init__(self, segments):
        b, length = segments.shape
        zeros = torch.zeros(b, dtype=torch.int64)
        # a window goes by columns here, since samples' positions follow one another
        columns = torch.arange(length).expand(b, -1)
        self.step = Step(torch.arange(b), segments, zeros, length, columns, segments=segments)

    def attend(self, query, keys, values, *, window, **scoring):
        mask = self.step.visible(window)
        if self.sees_before:
            mask = mask | F.pad(mask[..., 1:], (0, 1)) & (self.step.segments >= 0).unsqueeze(2)
        return attend(
            query, keys, values, tile_mask(mask, query.shape[1] // keys.shape[1]), **scoring
        )


def ragged_batch():
    """Two packed rows: samples of 21, 1 and 8 tokens; one of 17, then padding."""
    segments = torch.tensor([[0] * 21 + [1] + [2] * 8, [0] * 17 + [-1] * 13])
    places = torch.tensor([[*range(21), 0, *range(8)], [*range(17), *[0] * 13]])
    learned = (places >= 3) & (segments >= 0)
    ids = torch.tensor([random_ids(30, 1), random_ids(30, 2)])
    return TokenBatch(ids, learned, places, segments, segments)


def loss_and_gradients(drafter, batch, features):
    drafter.zero_grad()
    loss = drafter(batch, features, Noise(0)).total
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in drafter.parameters() if p.requires_grad)]


@pytest.mark.parametrize("family", [None, "mistral", "gemma3", "gpt_oss"])
def test_loss_and_gradients_of_packed_rows_are_those_of_a_dense_mask(
    target, tmp_path, monkeypatch, family
):
    monkeypatch.setattr(packed_attention, "_CPU_COLUMNS", 8)
    changes = {} if family is None else folder_with(tmp_path, family, num_hidden_layers=2)
    drafter = build(target, **changes)
    drafter.model.config._experts_implementation = "eager"  # the grouped matmul refuses float64
    batch = ragged_batch()
    features = target.read_features(batch, drafter.needs)
    got = loss_and_gradients(drafter, batch, features)
    assert all(grad.isfinite().all() for grad in got)
    assert any(grad.any() for grad in got[1:])
    atol = 1e-6 if family == "gpt_oss" else 1e-10
    monkeypatch.setattr(adapter, "PackedAttention", ByOneMask)
    expected = loss_and_gradients(drafter, batch, features)
    assert all(torch.allclose(a, b, atol=atol, rtol=0) for a, b in zip(got, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), "both ways ran"
    monkeypatch.setattr(ByOneMask, "sees_before", True)
    wrong = loss_and_gradients(drafter, batch, features)
    assert max((a - b).abs().max() for a, b in zip(got, wrong, strict=True)) > 1e-4


# ---------------------------------------------------------------- learnable tokens alone (AdaSPEC)

FEW = {"reference": "start", "learn_fraction": 0.4}


def two_packed_samples():
    """14 and 20 tokens in one row, 8 and 15 of them learned."""
    order = torch.arange(34)
    segments = (order >= 14).long()
    place = torch.where(order < 14, order, order - 14)
    learned = place >= torch.where(order < 14, 6, 5)
    parts = (torch.tensor(random_ids(34)), learned, place, segments, segments)
    return TokenBatch(*(part.unsqueeze(0) for part in parts))


def stirred(drafter, seed):
    """Move every weight, as a training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=0.2 * float(parameter.std()))
    return drafter


def token_losses(model, batch, teacher):
    """Loss of every learned token of each packed sample, which the model sees alone."""
    found = []
    for segment in (0, 1):
        own = batch.segment_ids[0] == segment
        ids, learned = batch.input_ids[0, own], batch.loss_mask[0, own][1:]
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1][learned]
        laws = teacher[0, own][:-1][learned]
        scores = score_rows(objective("forward_kl"), laws, logits, ids[1:][learned])
        found.append(scores.loss)
    return found


@pytest.mark.parametrize("normalise", ["sequence", "token"])
def test_of_every_sequence_only_the_tokens_furthest_behind_the_reference_are_learned(
    target, normalise
):
    drafter = stirred(build(target, **FEW, normalise=normalise), seed=1).train()
    batch = two_packed_samples()
    features = target.read_features(batch, drafter.needs)
    teacher = target.view.head(features.final)
    plain = plain_model(drafter)
    own = token_losses(plain, batch, teacher)
    with torch.no_grad():
        theirs = token_losses(plain_model(build(target)), batch, teacher)
    total, counts, choices = 0.0, 0, []
    for mine, other in zip(own, theirs, strict=True):
        gaps = (mine - other).tolist()
        kept = sorted(range(len(gaps)), key=lambda i: -gaps[i])[: round(0.4 * len(gaps))]
        loss = mine[kept].mean() if normalise == "sequence" else mine[kept].sum()
        total, counts = total + loss, counts + len(kept)
        choices.append(set(kept))
    total.backward()
    got = drafter(batch, features, Noise(0))
    assert [len(kept) for kept in choices] == [3, 6]
    assert got.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert got.count.tolist() == [counts]
    assert got.weight == (None if normalise == "sequence" else counts)
    got.total.backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(drafter.model.get_parameter(name).grad, parameter.grad, atol=1e-5)
    # choosing by the loss itself is another choice, so the reference has a say
    by_loss = own[1].argsort(descending=True)[:6].tolist()
    assert set(by_loss) != choices[1]


def test_a_sequence_s_choice_does_not_hang_on_what_it_is_packed_with(target):
    drafter = stirred(build(target, **FEW), seed=1).train()
    batch = two_packed_samples()
    together = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    total, count = 0.0, 0.0
    for segment in (0, 1):
        own = batch.segment_ids[0] == segment
        fields = (getattr(batch, name)[:, own] for name in ("input_ids", "loss_mask", "positions"))
        zeros = torch.zeros(1, int(own.sum()), dtype=torch.int64)
        alone = TokenBatch(*fields, zeros, zeros)
        loss = drafter(alone, target.read_features(alone, drafter.needs), Noise(0))
        total, count = total + loss.total.item(), count + loss.count
    assert together.total.item() == pytest.approx(total, rel=1e-9)
    assert torch.equal(together.count, count)


def test_outside_training_all_tokens_count(target):
    drafter = stirred(build(target, **FEW), seed=1).eval()
    batch = two_packed_samples()
    features = target.read_features(batch, drafter.needs)
    plain = stirred(build(target), seed=1)
    assert drafter(batch, features, Noise(0)).count.tolist() == [23]
    losses = [x(batch, features, Noise(0)).total for x in (drafter, plain)]
    assert torch.equal(*losses)


def test_a_reference_is_neither_trained_nor_saved_nor_needed_to_decode(target, tmp_path):
    trained = stirred(build(target), seed=2)
    save_drafter(trained, tmp_path / "reference", extra={})
    few = {"reference": str(tmp_path / "reference"), "learn_fraction": 0.5}
    drafter = stirred(build(target, **few), seed=1)
    plain = stirred(build(target), seed=1)
    batch = two_packed_samples()
    drafter.train()(batch, target.read_features(batch, drafter.needs), Noise(0)).total.backward()
    assert set(drafter.state_dict()) == set(plain.state_dict())
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in drafter.named_parameters()] == names
    (reference,) = drafter._references
    weights = reference.state_dict()
    assert all(torch.equal(weights[name], x) for name, x in trained.state_dict().items())
    assert all(not p.requires_grad and p.grad is None for p in reference.parameters())
    assert set(drafter.serving_weights().tensors) == set(plain.serving_weights().tensors)

    save_drafter(drafter, tmp_path / "out", extra={})
    shutil.rmtree(tmp_path / "reference")
    loaded = load_drafter(tmp_path / "out", target.view).eval()
    ids = random_ids(12)
    assert drafts_after(loaded, target, ids) == drafts_after(plain, target, ids)
    with pytest.raises(
        ConfigError, match=r"reference=.*holds no drafter.json; expected the folder"
    ):
        loaded.train()


def test_a_run_s_best_drafter_may_be_the_reference(target, tmp_path):
    best, checkpoints = stirred(build(target), seed=2), tmp_path / "checkpoints"
    save_drafter(best, checkpoints / "step-000001", extra={})
    (tmp_path / "config.yaml").write_text("")
    (checkpoints / "best").write_text("step-000001\n")
    drafter = build(target, reference=str(tmp_path), learn_fraction=0.5).train()
    weights = drafter._references[0].state_dict()
    assert all(torch.equal(weights[name], x) for name, x in best.state_dict().items())


def test_a_reference_of_another_kind_or_size_is_refused(target, tmp_path):
    data = yaml.safe_load((conf_dir() / "drafter" / "ngram.yaml").read_text(encoding="utf-8"))
    other = drafter_class("ngram")
    ngram = other(parse_settings(other.settings_class, data), target.view)
    save_drafter(ngram, tmp_path / "ngram", extra={})
    with pytest.raises(ConfigError, match="kind ngram; expected a draft_model"):
        build(target, reference=str(tmp_path / "ngram"), learn_fraction=0.4).train()
    narrow = folder_with(tmp_path / "narrow", hidden_size=32)
    save_drafter(build(target, **narrow), tmp_path / "small", extra={})
    with pytest.raises(ConfigError, match="has hidden size 32 and 320 head rows, this draft model"):
        build(target, reference=str(tmp_path / "small"), learn_fraction=0.4).train()
