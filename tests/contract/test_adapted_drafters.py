"""Adapters on every kind that trains: the base stays, decoding sees them, they are saved alone."""

import pytest
import torch
import yaml
from contract_kit import KINDS, VARIANTS, K, Session, make, some_ids, training_batch
from safetensors.torch import load_file

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.adapters import AdapterSettings, BaseDrafter, adapt, merged
from draftlab.drafters.base import num_trainable
from draftlab.drafters.store import load_adapted, load_drafter, read_card, save_drafter
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.sampling import Sampling
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target

SETTINGS = AdapterSettings(kind="lora", rank=4, alpha=6.0)
SCALE = 6.0 / 4
SAMPLED = Sampling(temperature=1.0)
# own heads, biases, low ranks and a Markov projection are wired in ways of their own
WIRED = ("medusa-own", "medusa-low_rank", "eagle-reduced", "dspark-reduced", "mtp-mimo")
TRAINED = ("eagle", "eagle3", "medusa", "hydra", "dflash", "dspark", "peagle", "mtp", "draft_model")
NOT_TRAINED = ("hetero", "hybrid", "ngram", "self_speculative", "suffix")

every_wiring = pytest.mark.parametrize("case", sorted({*TRAINED, *WIRED}))
every_kind = pytest.mark.parametrize("case", TRAINED)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def adapted(case, target, base=None, *, says=0.0):
    """A case's drafter with adapters, whose B holds random numbers of that size."""
    drafter = make(case, target)
    adapt(drafter, SETTINGS, base or BaseDrafter(None, "0" * 64), seed=3)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora_B" in name:
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(says * (2 * drawn - 1))
    return drafter


def merged_by_hand(drafter, plain):
    """Write W + scale B A into a drafter without adapters, by their names in drafter's state."""
    state = drafter.state_dict()
    with torch.no_grad():
        for name in drafter.adapter.layers:
            a = state[f"{name}.lora_A.default.weight"]
            b = state[f"{name}.lora_B.default.weight"]
            plain.get_parameter(f"{name}.weight").add_(SCALE * (b @ a))
    return plain


def loss_of(drafter, target):
    batch = training_batch()
    return drafter(batch, target.read_features(batch, drafter.needs), Noise(0))


def proposals(drafter, target):
    session = Session(target, drafter)
    session.show(0, some_ids(12), anchor=some_ids(13)[-1])
    return session.propose([0], SAMPLED)


def test_every_kind_is_here():
    assert sorted(KINDS) == sorted({*TRAINED, *NOT_TRAINED})
    assert set(WIRED) <= set(VARIANTS)


@every_kind
def test_a_new_adapter_says_nothing(case, target):
    base = loss_of(make(case, target), target)
    assert torch.equal(loss_of(adapted(case, target), target).total, base.total)


@every_kind
def test_training_lowers_the_loss_and_leaves_every_bit_of_the_base(case, target):
    drafter = adapted(case, target).train()
    before = {n: p.clone() for n, p in drafter.named_parameters() if not p.requires_grad}
    head = target.view.head_rows(None).clone()
    trained = [p for p in drafter.parameters() if p.requires_grad]
    names = {n for n, p in drafter.named_parameters() if p.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert not any("lm_head" in name for name in names)
    optimizer = torch.optim.AdamW(trained, lr=2e-2, weight_decay=0.0)
    losses = []
    for _ in range(5):
        loss = loss_of(drafter, target).total
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
    assert losses[-1] < 0.99 * losses[0]
    after = dict(drafter.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert torch.equal(target.view.head_rows(None), head)


@every_wiring
def test_merged_weights_compute_what_adapters_compute_and_the_base_does_not(case, target):
    drafter = adapted(case, target, says=0.02)
    beside = loss_of(drafter, target)
    with merged(drafter):
        within = loss_of(drafter, target)
    assert within.total.item() == pytest.approx(beside.total.item(), rel=1e-10)
    torch.testing.assert_close(within.overlap_sum, beside.overlap_sum, rtol=1e-6, atol=1e-6)
    ignored = loss_of(make(case, target), target).total.item()
    assert abs(ignored - beside.total.item()) > 1e-6 * abs(ignored)  # the negative control


@every_wiring
def test_decoding_reads_merged_weights_and_the_base_would_say_something_else(case, target):
    drafter = adapted(case, target, says=0.05)
    with merged(drafter):
        tree = proposals(drafter, target)
    expected = proposals(merged_by_hand(drafter, make(case, target)), target)
    assert torch.equal(tree.tokens, expected.tokens)
    torch.testing.assert_close(tree.law_probs, expected.law_probs, rtol=1e-10, atol=1e-10)
    ignored = proposals(make(case, target), target)
    assert (tree.law_probs[:, 0] - ignored.law_probs[:, 0]).abs().max() > 1e-8


@every_kind
def test_merging_for_a_while_leaves_every_bit_and_unmerged_adapters_refuse_to_decode(case, target):
    drafter = adapted(case, target, says=0.05)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    kept = drafter.adapter
    with merged(drafter):
        assert drafter.adapter is None
        assert not [name for name in drafter.state_dict() if "lora" in name]
    assert drafter.adapter is kept
    after = drafter.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for call in (lambda: drafter.open(1, 8, target.open_kv(1, 8)), drafter.serving_weights):
        with pytest.raises(ConfigError, match="adapters beside its weights"):
            call()


@every_kind
def test_it_is_saved_alone_loads_merged_decodes_losslessly_and_can_go_on(
    case, target, plain_answers, tmp_path
):
    save_drafter(make(case, target), tmp_path / "base", extra={})
    base = BaseDrafter(tmp_path / "base", read_card(tmp_path / "base").sha256)
    drafter = adapted(case, target, base, says=0.05)
    save_drafter(drafter, tmp_path / "mine", extra={"step": 3})

    files = sorted(path.name for path in (tmp_path / "mine").iterdir())
    assert files == ["adapter.safetensors", "drafter.json"]
    numbers = {n: x.numel() for n, x in load_file(tmp_path / "mine" / files[0]).items()}
    factors = {name: count for name, count in numbers.items() if ".lora_" in name}
    assert sum(factors.values()) == num_trainable(drafter)
    assert set(numbers) - set(factors) <= {"rank_hits"}
    assert read_card(tmp_path / "mine").extra == {"step": 3}

    loaded = load_drafter(tmp_path / "mine", target.view)
    trained = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in make(case, target).named_parameters() if p.requires_grad}
    with merged(drafter):
        expected = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in loaded.state_dict().items())
    assert answers(target, loaded.eval()) == plain_answers

    again = load_adapted(tmp_path / "mine", target.view)
    assert again.adapter == drafter.adapter
    mine, theirs = again.state_dict(), drafter.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.fixture(scope="module")
def plain_answers(target):
    return answers(target, None)


def answers(target, drafter):
    data = yaml.safe_load((conf_dir() / "decode" / "greedy.yaml").read_text())
    data |= {"num_draft_tokens": K, "prefill_tokens": 16}
    found = Decoder(target, drafter, parse_settings(DecodeSettings, data)).generate(
        [some_ids(n, seed=n) for n in (1, 5, 14)], max_new_tokens=10, batch_size=2
    )
    return [answer.output_ids for answer in found]


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_drafter_with_nothing_to_adapt_is_refused(kind, target):
    drafter = make(kind, target)
    with pytest.raises(ConfigError, match=f"drafter kind '{kind}' has no linear layer"):
        adapt(drafter, SETTINGS, BaseDrafter(None, ""), seed=0)
