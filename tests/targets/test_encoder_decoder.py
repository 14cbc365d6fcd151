"""Targets of the T5 family: stepwise passes equal transformers' whole forward, in float64."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from draftlab.data.batch import TokenBatch
from draftlab.errors import ConfigError, ShapeMismatch, UnsupportedTarget
from draftlab.settings.base import parse_settings
from draftlab.targets.encoder_decoder import build_encoder_decoder
from draftlab.targets.features import FeatureRequest
from draftlab.targets.load import load_target
from draftlab.targets.settings import TargetSettings
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target, tiny_tokenizer

# T5 1.0 (relu, head tied and scaled) and 1.1 (gated, neither); umT5 has a bias table a layer
KINDS = {
    "t5": ("t5", {}),
    "t5-1.1": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": ("umt5", {"feed_forward_proj": "gated-gelu"}),
}
PROMPTS = [[5, 9, 77, 30, 12, 8, 100], [3], [200, 4, 4, 18]]
EXACT = 1e-9


def tiny_model(kind="t5", seed=0, **sizes):
    family, changes = KINDS[kind]
    tokenizer = tiny_tokenizer()
    entries = {
        "vocab_size": 320,
        "d_model": 48,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,  # so that far distances share a row
        "relative_attention_max_distance": 12,
        "decoder_start_token_id": tokenizer.pad_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = AutoConfig.for_model(family, **entries | changes | sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config).double().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3.0)
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:
                weight.mul_(8.0)  # a wrong distance must show
    return model


@pytest.fixture(scope="module", params=KINDS)
def target(request):
    if request.param == "umt5" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("this version's umT5 computes another relative bias: loading refuses it")
    return build_encoder_decoder(
        tiny_model(request.param), tiny_tokenizer(), name=request.param, source="tiny"
    )


@torch.no_grad()
def whole(target, prompt, text):
    """Logits of every place of an answer, by transformers alone."""
    ids, answer = torch.tensor([prompt]), torch.tensor([text])
    return target.model(input_ids=ids, decoder_input_ids=answer, use_cache=False).logits[0]


def some_texts(target, count=20):
    start = target.model.config.decoder_start_token_id
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 256, (len(PROMPTS), count), generator=generator).tolist()
    return [[start, *text] for text in drawn]


def run(target, kv, texts, base, width):
    ids = torch.tensor([t[b : b + width] for t, b in zip(texts, base, strict=True)])
    step = Step(torch.arange(len(texts)), ids, torch.tensor(base), max(base) + width)
    return target.run(kv, step)


def test_an_answer_starts_from_the_models_start_token(target):
    kv = target.open_kv(3, 8)
    starts = target.encode(kv, [2, 0, 1], PROMPTS)
    assert starts == [[target.model.config.decoder_start_token_id]] * 3
    assert kv.prompts == [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    assert target.speculation_refusal is None


def test_ragged_chains_equal_whole_passes(target):
    texts = some_texts(target)
    kv = target.open_kv(3, 40)
    target.encode(kv, [0, 1, 2], PROMPTS)
    base = [0, 0, 0]
    for kept in ([4, 1, 3], [2, 4, 3], [4, 3, 2], [1, 4, 4]):
        out = run(target, kv, texts, base, 4).logits
        for row, (first, count) in enumerate(zip(base, kept, strict=True)):
            expected = whole(target, PROMPTS[row], texts[row][: first + count])[first:]
            assert float((out[row, :count] - expected).abs().max()) < EXACT
        base = [b + k for b, k in zip(base, kept, strict=True)]


TREE = [-1, 0, 0, 1, 1, 2, 5]  # columns: the anchor, then the parents of each node


def tree_step(ids, base, rows):
    depths, sees = [], torch.eye(len(TREE), dtype=torch.bool)
    for column, parent in enumerate(TREE):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent >= 0:
            sees[column] |= sees[parent]
    count = len(rows)
    return Step(
        rows,
        ids,
        base,
        int(base.max()) + len(TREE),
        torch.tensor(depths).expand(count, -1),
        sees.expand(count, -1, -1),
    )


def path_to(column):
    return [] if column < 0 else [*path_to(TREE[column]), column]


def test_every_branch_of_a_tree_equals_a_whole_pass_and_compaction_keeps_it(target):
    texts = some_texts(target)
    kv = target.open_kv(3, 40)
    target.encode(kv, [0, 1, 2], PROMPTS)
    run(target, kv, texts, [0, 0, 0], 12)
    base = [12, 3, 7]
    ids = torch.randint(0, 256, (3, len(TREE)), generator=torch.Generator().manual_seed(1))
    out = target.run(kv, tree_step(ids, torch.tensor(base), torch.arange(3))).logits
    for row, first in enumerate(base):
        for column in range(len(TREE)):
            text = texts[row][:first] + ids[row, path_to(column)].tolist()
            expected = whole(target, PROMPTS[row], text)[-1]
            assert float((out[row, column] - expected).abs().max()) < EXACT
    # the path 2, 5, 6 is accepted: nodes 1, 4, 5 behind the anchor
    with torch.inference_mode():
        kv.compact(torch.arange(3), torch.tensor(base), torch.tensor([[1, 4, 5]]).expand(3, -1))
    longer = [
        texts[row][:first] + ids[row, [0, 2, 5, 6]].tolist() + [9] for row, first in enumerate(base)
    ]
    out = run(target, kv, longer, [b + 4 for b in base], 1).logits
    for row, text in enumerate(longer):
        assert float((out[row, 0] - whole(target, PROMPTS[row], text)[-1]).abs().max()) < EXACT


def test_slots_instead_of_depths_would_show(target):
    """The negative control: in a tree, distance by slot is another number."""
    texts = some_texts(target)
    kv = target.open_kv(3, 40)
    target.encode(kv, [0, 1, 2], PROMPTS)
    run(target, kv, texts, [0, 0, 0], 8)
    ids = torch.randint(0, 256, (3, len(TREE)), generator=torch.Generator().manual_seed(1))
    right = tree_step(ids, torch.tensor([8, 8, 8]), torch.arange(3))
    wrong = Step(right.rows, right.ids, right.base, right.live, None, right.ancestors)
    gap = (target.run(kv, right).logits - target.run(kv, wrong).logits).abs()
    assert float(gap[:, [5, 6]].max()) > 1e-3


def test_rows_do_not_touch_each_other_and_slots_take_new_prompts(target):
    texts = some_texts(target)
    shared = target.open_kv(4, 40)
    target.encode(shared, [3, 1], [[7] * 30, PROMPTS[1]])
    run_in = Step(torch.tensor([3]), torch.tensor([texts[1][:9]]), torch.tensor([0]), 9)
    target.run(shared, run_in)
    target.encode(shared, [3], [PROMPTS[0]])  # shorter than the one before
    rows = torch.tensor([3, 1])
    ids = torch.tensor([texts[0][:6], texts[1][:6]])
    out = target.run(shared, Step(rows, ids, torch.tensor([0, 0]), 6)).logits
    for row in (0, 1):
        expected = whole(target, PROMPTS[row], texts[row][:6])
        assert float((out[row] - expected).abs().max()) < EXACT


def test_hidden_states_are_the_decoders(target):
    kv = target.open_kv(1, 16)
    target.encode(kv, [0], PROMPTS[:1])
    text = some_texts(target)[0][:5]
    request = FeatureRequest((1, 3), wants_final=True)
    out = target.run(
        kv, Step(torch.tensor([0]), torch.tensor([text]), torch.tensor([0]), 5), request=request
    )
    with torch.no_grad():
        told = target.model(
            input_ids=torch.tensor(PROMPTS[:1]),
            decoder_input_ids=torch.tensor([text]),
            output_hidden_states=True,
        )
    assert torch.allclose(out.features.taps[0, :, 0], told.decoder_hidden_states[1][0], atol=EXACT)
    assert torch.allclose(target.view.head(out.features.final), told.logits, atol=EXACT)


@pytest.mark.parametrize("kind", ["t5", "t5-1.1"])
def test_a_folder_is_loaded_as_what_it_is(kind, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    data = {"source": "local", "name": str(tmp_path), "revision": None, "family": "", "seed": 0}
    data |= {"dtype": "float64", "device": "cpu", "kernels": "auto", "remote_code": "refuse"}
    target = load_target(parse_settings(TargetSettings, data | {"cache_dir": ""}))
    kv = target.open_kv(1, 8)
    start = target.encode(kv, [0], PROMPTS[:1])
    out = target.run(kv, Step(torch.tensor([0]), torch.tensor(start), torch.tensor([0]), 1)).logits
    expected = whole(target, PROMPTS[0], start[0])
    assert float((out[0] - expected).abs().max()) < EXACT
    assert target.report["stepwise_difference"] < EXACT
    assert target.report["kernels"] == "encoder_decoder"


def test_bfloat16_passes_stay_close(target):
    model = tiny_model(target.spec.name).to(torch.bfloat16)
    rounded = build_encoder_decoder(model, tiny_tokenizer(), name="half", source="tiny")
    assert rounded.report["stepwise_difference"] < 0.06


def test_a_decoder_only_target_starts_from_the_prompt_itself():
    target = tiny_target()
    assert target.encode(target.open_kv(1, 8), [0], [[1, 2]]) == [[1, 2]]


def test_what_cannot_be_done_is_refused_in_words(target):
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(UnsupportedTarget, match="trains nothing on it; pass drafter=draft_model"):
        target.read_features(
            TokenBatch(zeros, zeros > 0, zeros, zeros, zeros), FeatureRequest(wants_final=True)
        )
    with pytest.raises(UnsupportedTarget, match="use encode and run"):
        target.forward_plainly(zeros)
    kv = target.open_kv(1, 2)
    with pytest.raises(UnsupportedTarget, match="do not run one by one"):
        target.view.run_layers(kv, Step(zeros[0, :1], zeros, zeros[0, :1], 2), (0,))
    with pytest.raises(ShapeMismatch, match="reaches slot 3 of EncoderDecoderKV with capacity 2"):
        target.run(kv, Step(zeros[0, :1], zeros, zeros[0, :1] + 2, 4))


def test_other_families_and_a_missing_start_are_refused():
    config = AutoConfig.for_model("bart", vocab_size=300, d_model=16, encoder_layers=1)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UnsupportedTarget, match="of type bart; expected one of t5, mt5, umt5"):
        build_encoder_decoder(model, tiny_tokenizer(), name="b", source="tiny")
    model = tiny_model()
    model.config.decoder_start_token_id = None
    with pytest.raises(ConfigError, match="no decoder_start_token_id"):
        build_encoder_decoder(model, tiny_tokenizer(), name="n", source="tiny")
