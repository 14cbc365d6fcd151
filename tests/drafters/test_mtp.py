"""Multi-token prediction: the recursion against a loop, starts, and the module a target ships."""

import building
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab.data.batch import TokenBatch
from draftlab.drafters._mtp_layout import MIMO_PREFIX, from_mimo, to_mimo
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.layers import rotate, signed_sin
from draftlab.drafters.mtp import MTP
from draftlab.errors import ConfigError
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY
from draftlab.targets.target import build_target
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

DEPTHS = 3
LENGTH, PROMPT = 12, 4


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=2)


def settings(**changes):
    return building.settings("mtp", **changes)


def build(target, vocab_ids=None, **changes):
    return building.build("mtp", target, vocab_ids, stir=0.05, **changes)


def sample(ids=None):
    if ids is None:
        ids = torch.randint(200, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    place = torch.arange(ids.shape[1]).unsqueeze(0)
    zeros = torch.zeros_like(place)
    return TokenBatch(ids, place >= PROMPT, place, zeros, zeros)


@torch.no_grad()
def looped(drafter, ids, final, row, depths=DEPTHS):
    """What the module gives at each depth of one row, position by position and head by head."""
    layer, sizes = drafter.layer, drafter.layer.sizes

    def at(position, token, hidden):
        embedded = drafter.target.embed(token.view(1)) * (position > 0)
        parts = [drafter.embedding_norm(embedded), drafter.hidden_norm(hidden.view(1, -1))]
        if drafter.settings.hidden_first:
            parts.reverse()
        residual = drafter.eh_proj(torch.cat(parts, -1))
        x = layer.input_layernorm(residual)
        cos, sin = drafter.target.rope(torch.tensor([position]))
        turn = cos.double(), signed_sin(sin).double()
        split = (1, -1, sizes.head_dim)
        query = rotate(layer.self_attn.q_proj(x).view(split), *turn)[0]
        key = rotate(layer.self_attn.k_proj(x).view(split), *turn)[0]
        return residual, query, key, layer.self_attn.v_proj(x).view(split)[0]

    past = [at(j, ids[j + 1], final[j])[2:] for j in range(row)]
    hidden, states = final[row], []
    for depth in range(depths):
        residual, query, key, value = at(row + depth, ids[row + 1 + depth], hidden)
        past.append((key, value))
        mixed = []
        for head in range(sizes.heads):
            own = head // (sizes.heads // sizes.kv_heads)
            scores = torch.stack([query[head] @ k[own] for k, _ in past]) * sizes.head_dim**-0.5
            mixed.append(sum(w * v[own] for w, (_, v) in zip(scores.softmax(0), past, strict=True)))
        hidden = drafter.norm(layer.finish(torch.cat(mixed).unsqueeze(0), residual))[0]
        states.append(hidden)
    return states


@pytest.mark.parametrize("vocab_ids", [None, torch.arange(0, 240, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize("mimo", [False, True])
def test_depth_k_reads_the_output_of_the_one_before_and_is_judged_where_it_predicts(
    target, mimo, vocab_ids
):
    drafter = build(target, vocab_ids, attention_bias=mimo, hidden_first=mimo)
    batch = sample()
    features = target.read_features(batch, drafter.needs)
    got = drafter(batch, features, Noise(0))
    ids, final = batch.input_ids[0], features.final[0]
    total = weights = 0.0
    losses = torch.zeros(DEPTHS, dtype=torch.float64)
    for t in range(LENGTH - 2):
        depths = min(DEPTHS, LENGTH - 2 - t)
        for k, state in enumerate(looped(drafter, ids, final, t, depths)):
            if t + 2 + k < PROMPT:
                continue
            scores = score_rows(
                objective("forward_kl"),
                target.view.head(final[t + 1 + k : t + 2 + k]),
                (target.view.head_rows(vocab_ids) @ state).unsqueeze(0),
                ids[t + 2 + k : t + 3 + k],
                vocab_ids,
            )
            total += 0.6**k * scores.loss.item()
            weights += 0.6**k
            if vocab_ids is None or (t + 1 + k) % 8 == 0:  # where a reduced vocabulary is judged
                losses[k] += scores.loss.item()
    assert got.total.item() == pytest.approx(total / weights)
    assert got.loss_sum.tolist() == pytest.approx(losses.tolist())


@pytest.mark.parametrize("mimo", [False, True])
def test_decoding_gives_what_training_computes_at_the_same_tokens(target, mimo):
    drafter = build(target, attention_bias=mimo, hidden_first=mimo)
    known = sample().input_ids
    final = target.read_features(sample(), drafter.needs).final
    state = drafter.open(1, 32, target.open_kv(1, 32))
    row, length = torch.tensor([0]), torch.tensor([LENGTH - 1])
    drafter.observe(
        state, Observation(row, known[:, :-1], length, known[:, 1:], None, final[:, :-1])
    )
    tree = drafter.propose(
        state, DraftBudget(row, DEPTHS, GREEDY), torch.zeros(1, DEPTHS, dtype=torch.float64)
    )
    ids = torch.cat([known[0], tree.tokens[0]])
    states = looped(drafter, ids, final[0], LENGTH - 2)
    rows = target.view.head_rows(None)[: target.spec.num_token_ids]
    assert [int((rows @ state).argmax()) for state in states] == tree.tokens[0].tolist()


def test_d_pace_weighs_likely_chains_more_and_needs_no_decay(target):
    changes = {"position_weights": "d_pace", "step_decay": None}
    batch = sample()
    features = target.read_features(batch, MTP(settings(), target.view).needs)
    paced, even = build(target, **changes), build(target, step_decay=1.0)
    a, b = paced(batch, features, Noise(0)), even(batch, features, Noise(0))
    assert torch.allclose(a.loss_sum, b.loss_sum)
    assert a.total.item() != pytest.approx(b.total.item(), rel=1e-6)


@pytest.mark.parametrize("hidden_first", [False, True])
def test_a_start_from_a_layer_reads_the_final_state_alone(target, hidden_first):
    drafter = MTP(
        settings(start="layer", init_from_layer=-1, hidden_first=hidden_first), target.view
    )
    state = target.view.layer_state(1)
    assert all(torch.equal(p, state[n]) for n, p in drafter.layer.named_parameters())
    hidden, embedded = torch.randn(2, 1, 64, dtype=torch.float64)
    assert torch.allclose(drafter._join(embedded, hidden), drafter.hidden_norm(hidden))


def test_layers_that_are_not_there_or_do_not_fit_are_refused(target):
    with pytest.raises(ConfigError, match=r"init_from_layer=2: target tiny-llama has 2 layers"):
        MTP(settings(start="layer", init_from_layer=2), target.view)
    with pytest.raises(ConfigError, match=r"layer 0 .* has no self_attn.k_proj.bias.*attention_b"):
        MTP(settings(start="layer", init_from_layer=0, attention_bias=True), target.view)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "layer"}, "init_from_layer=None with start=layer"),
        ({"init_from_layer": 1}, "init_from_layer=1 with start=random"),
        ({"start": "checkpoint"}, "hidden_first=false with start=checkpoint"),
        ({"step_decay": None}, "step_decay=None with position_weights=decay"),
        ({"position_weights": "d_pace"}, "step_decay=0.6 with position_weights=d_pace"),
        ({"objective": "kl"}, "objective='kl': expected one of"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


# ------------------------------------------------------- the module a target ships


def mimo_tensors():
    """A random module under MiMo's names."""
    generator = torch.Generator().manual_seed(5)
    config = build_tiny_model(num_hidden_layers=1).config
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes = {
        "token_layernorm.weight": (width,),
        "hidden_layernorm.weight": (width,),
        "input_proj.weight": (width, 2 * width),
        "final_layernorm.weight": (width,),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    return {MIMO_PREFIX + n: torch.randn(s, generator=generator) for n, s in shapes.items()}


@pytest.fixture(scope="module")
def shipping_target(tmp_path_factory):
    """A target whose checkpoint holds such a module, which transformers does not load."""
    folder = tmp_path_factory.mktemp("mimo")
    model = build_tiny_model(dtype=torch.float32, num_hidden_layers=2)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | mimo_tensors(), path, metadata={"format": "pt"})
    model.config._name_or_path = str(folder)
    return build_target(model, tiny_tokenizer(), name="shipping", source="local")


MIMO = {"start": "checkpoint", "attention_bias": True, "hidden_first": True}


def test_the_module_of_a_checkpoint_is_taken_as_it_is(shipping_target):
    drafter = MTP(settings(**MIMO), shipping_target.view)
    there = mimo_tensors()
    assert torch.equal(drafter.embedding_norm.weight, there[MIMO_PREFIX + "token_layernorm.weight"])
    assert torch.equal(drafter.eh_proj.weight, there[MIMO_PREFIX + "input_proj.weight"])
    assert torch.equal(
        drafter.layer.self_attn.k_proj.bias, there[MIMO_PREFIX + "self_attn.k_proj.bias"]
    )
    back = to_mimo(drafter.serving_weights().tensors)
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name], there[name]) for name in there)
    assert from_mimo(there).keys() == drafter.state_dict().keys()


def test_a_checkpoint_without_a_module_or_with_another_one_is_refused(target, shipping_target):
    with pytest.raises(ConfigError, match=r"tiny-llama has no model.mtp_layers.0.\* tensors"):
        MTP(settings(**MIMO), target.view)
    with pytest.raises(ConfigError, match=r"it has layer.self_attn.k_proj.bias.*attention_bias"):
        MTP(settings(**(MIMO | {"attention_bias": False})), shipping_target.view)
