"""Draft models: where they start, what they learn, how they keep up, what they hand out."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.draft_model import DraftModel, DraftModelSettings
from draftlab.errors import ConfigError, TargetMismatch
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY
from draftlab.settings.base import parse_settings
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
        "lora_rank": None,
        "lora_alpha": None,
        "objective": "forward_kl",
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
    return drafter.merged_model()


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


def test_lora_trains_adapters_alone_and_merges_them_for_export(target, tmp_path):
    drafter = build(target, trainable="lora", lora_rank=4, lora_alpha=8)
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and ".layers." in name for name in trained)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    drafter.save_pretrained_folder(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert not [name for name in loaded.state_dict() if "lora" in name]
    ids = random_ids(9)
    known = target.spec.num_token_ids
    assert drafts_after(drafter, target, ids) == greedy_continuation(loaded, ids, K, known)
    bare = build(target)
    assert not torch.equal(
        loaded.get_parameter("model.layers.0.mlp.up_proj.weight"),
        bare.model.get_parameter("model.layers.0.mlp.up_proj.weight"),
    )


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
        ({"trainable": "lora"}, "lora_rank=None and lora_alpha=None with trainable=lora"),
        ({"lora_rank": 4, "lora_alpha": 8}, "with trainable=all"),
        ({"revision": "v1"}, "revision=v1 has no effect"),
        ({"objective": "kl"}, "objective='kl'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(target, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(target, **changes)
