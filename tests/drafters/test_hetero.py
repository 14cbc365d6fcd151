"""Drafts from another vocabulary: what is shared, what the draft model reads, which law it draws."""

import pytest
import torch
from small_tokenizers import TEXT, byte_level, sentencepiece, wordpiece, wrap
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

from draftlab.drafters._two_vocabularies import Retelling, build_bridge
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.draft_model import DraftModel, DraftModelSettings
from draftlab.drafters.hetero import Hetero, HeteroSettings
from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.sampling import GREEDY, Sampling, SamplingRows
from draftlab.settings.base import parse_settings
from draftlab.targets.target import build_target
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

K = 3
NAMES = "target t", "draft model d"
SAMPLED = Sampling(temperature=1.0)
STYLES = {"byte_level": byte_level, "sentencepiece": sentencepiece, "wordpiece": wordpiece}


def settings(model, **changes):
    data = {"kind": "hetero", "num_draft_tokens": K, "model": str(model), "revision": None}
    return parse_settings(HeteroSettings, data | {"method": "tli"} | changes)


def target_with(tokenizer, **sizes):
    model = build_tiny_model(vocab_size=len(tokenizer) + 9, **sizes)
    return build_target(model, tokenizer, name="t", source="tiny")


def save(folder, tokenizer, seed=1, **sizes):
    sizes = {"vocab_size": max(len(tokenizer) + 5, 261)} | sizes
    build_tiny_model("llama", torch.float64, seed=seed, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def target_memory():
    """Only self-speculative drafters read it."""
    return tiny_target().open_kv(1, 4)


def propose_after(
    drafter, ids, uniforms=None, sampling=GREEDY, rows=1, chunk=None, depth=K, sure=None
):
    """Show all ids but the last, which is the anchor, and ask for drafts."""
    state = drafter.open(rows, len(ids) + depth, target_memory())
    chunk = chunk or len(ids)
    for start in range(0, len(ids) - 1, chunk):
        stop = min(start + chunk, len(ids) - 1)
        seen = Observation(
            rows=torch.arange(rows),
            ids=torch.tensor([ids[start:stop]] * rows),
            lengths=torch.full((rows,), stop - start),
            next_ids=torch.tensor([ids[start + 1 : stop + 1]] * rows),
            taps=None,
            final=None,
        )
        drafter.observe(state, seen)
    if uniforms is None:
        uniforms = torch.zeros(rows, depth, dtype=torch.float64)
    budget = DraftBudget(torch.arange(rows), depth, sampling, min_confidence=sure)
    return drafter.propose(state, budget, uniforms)


def told(bridge, ids, chunk):
    retelling = Retelling(bridge)
    for start in range(0, len(ids), chunk):
        retelling.extend(ids[start : start + chunk])
    return retelling.ids


# ------------------------------------------------------------------ what is shared


@pytest.mark.parametrize("here", STYLES)
@pytest.mark.parametrize("there", STYLES)
def test_shared_tokens_are_those_that_say_the_same_however_they_are_written(here, there):
    mine, theirs = STYLES[here](), STYLES[there]()
    bridge = build_bridge(mine, theirs, NAMES)
    assert bridge.target_ids == sorted(set(bridge.target_ids))
    assert len(set(bridge.draft_ids)) == len(bridge.draft_ids)
    pairs = dict(zip(bridge.target_ids, bridge.draft_ids, strict=True))
    ordinary = {t: d for t, d in pairs.items() if t not in bridge.target.special}
    assert all(bridge.target.pieces[t] == bridge.draft.pieces[d] for t, d in ordinary.items())
    # and none is missing
    common = set(bridge.target.pieces.values()) & set(bridge.draft.pieces.values()) - {b""}
    assert {bridge.target.pieces[t] for t in ordinary} == common
    assert len(common) > 20


def test_a_word_with_its_space_is_found_in_every_way_of_writing():
    spellings = [(byte_level(), "Ġthe"), (sentencepiece(), "▁the"), (wordpiece(), "the")]
    for mine, word in spellings:
        for theirs, other in spellings:
            bridge = build_bridge(mine, theirs, NAMES)
            pairs = dict(zip(bridge.target_ids, bridge.draft_ids, strict=True))
            found = pairs[mine.convert_tokens_to_ids(word)]
            assert found == theirs.convert_tokens_to_ids(other)


def test_what_continues_a_word_is_not_what_begins_one():
    mine, theirs = wordpiece(), byte_level()
    bridge = build_bridge(mine, theirs, NAMES)
    pairs = dict(zip(bridge.target_ids, bridge.draft_ids, strict=True))
    assert pairs[mine.convert_tokens_to_ids("##e")] == theirs.convert_tokens_to_ids("e")
    assert mine.convert_tokens_to_ids("e") not in pairs or (
        pairs[mine.convert_tokens_to_ids("e")] == theirs.convert_tokens_to_ids("Ġe")
    )


def test_special_tokens_match_by_role_or_name_and_never_ordinary_ones():
    mine = byte_level(eos="<|im_end|>", pad_token="<pad>", bos_token="the")  # a bos spelt "the"
    theirs = byte_level(eos="</s>", pad_token="<pad>")
    theirs.add_tokens(["<|im_end|>"])  # an ordinary token there
    bridge = build_bridge(mine, theirs, NAMES)
    assert bridge.draft_special == {
        mine.eos_token_id: theirs.eos_token_id,
        mine.pad_token_id: theirs.pad_token_id,
    }
    assert theirs.convert_tokens_to_ids("<|im_end|>") not in bridge.draft_ids
    assert mine.bos_token_id not in bridge.target_ids


def test_a_byte_token_gives_way_to_the_plain_one():
    tokenizer = sentencepiece()
    bridge = build_bridge(byte_level(), tokenizer, NAMES)
    plain = tokenizer.convert_tokens_to_ids("e")
    assert plain in bridge.draft_ids
    assert tokenizer.convert_tokens_to_ids("<0x65>") not in bridge.draft_ids
    assert tokenizer.convert_tokens_to_ids("<0xF0>") in bridge.draft_ids  # a byte with no letter


# ------------------------------------------------------------------ what the draft model reads


@pytest.mark.parametrize("here", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("there", ["byte_level", "sentencepiece", "wordpiece"])
def test_the_draft_reads_what_its_own_tokenizer_makes_of_the_text(here, there):
    mine, theirs = STYLES[here](360 if here == "byte_level" else 150), STYLES[there]()
    bridge = build_bridge(mine, theirs, NAMES)
    ids = mine(TEXT)["input_ids"]
    assert told(bridge, ids, len(ids)) == theirs(TEXT)["input_ids"]
    assert len(ids) > 150


@pytest.mark.parametrize("chunk", [1, 2, 7, 50])
def test_the_telling_does_not_depend_on_how_the_tokens_come_in(chunk):
    bridge = build_bridge(byte_level(), sentencepiece(), NAMES)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(len(byte_level()), (300,), generator=generator).tolist()
    for ids in (byte_level()(TEXT)["input_ids"], random):
        assert told(bridge, ids, chunk) == told(bridge, ids, len(ids))


def test_stable_ids_never_change_and_only_a_short_tail_is_open():
    tokenizer = byte_level()
    retelling = Retelling(build_bridge(tokenizer, sentencepiece(), NAMES))
    sure: list[int] = []
    for token in tokenizer(TEXT * 3)["input_ids"]:
        retelling.extend([token])
        assert retelling.ids[: len(sure)] == sure
        sure = retelling.ids[: retelling.stable]
        assert len(retelling.open) <= 96
    assert len(sure) > 0.8 * len(retelling.ids)


def test_special_tokens_become_the_drafts_own_or_plain_text_and_a_beginning_is_not_doubled():
    mine = byte_level(additional_special_tokens=["<|user|>"], bos_token="<bos>")
    theirs = sentencepiece()
    bridge = build_bridge(mine, theirs, NAMES)
    ids = [mine.bos_token_id, *mine("<|user|>the dog")["input_ids"], mine.eos_token_id]
    expected = [*theirs("x")["input_ids"][:1]]
    assert expected == [theirs.bos_token_id]
    got = told(bridge, ids, 1)
    assert got.count(theirs.bos_token_id) == 1
    assert got[-1] == theirs.eos_token_id
    assert theirs.decode(got[1:-1]) == "<|user|> the dog"  # as its tokenizer opens a text


# ------------------------------------------------------------------ drafts by tokens


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A byte-level target, and a sentencepiece draft model beside it."""
    folder = save(tmp_path_factory.mktemp("draft"), sentencepiece())
    target = target_with(byte_level(size=360))
    return target, folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@torch.no_grad()
def logits_after(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("length", [3, 60, 200])
def test_drafts_are_the_models_best_shared_tokens_after_its_own_reading(pair, length):
    target, folder, model = pair
    drafter = Hetero(settings(folder), target.view)
    ids = (target.tokenizer(TEXT)["input_ids"])[:length]
    context = told(drafter.bridge, ids, length)
    expected = []
    for _ in range(K):
        scores = logits_after(model, context)[drafter.bridge.draft_ids]
        best = int(scores.argmax())
        expected.append(drafter.bridge.target_ids[best])
        context = [*context, drafter.bridge.draft_ids[best]]
    for chunk in (1, 9, length):
        assert propose_after(drafter, ids, chunk=chunk).tokens[0].tolist() == expected


def test_tokens_are_drawn_from_the_law_that_is_reported(pair):
    """Uniforms at interval midpoints: counts are the law's to 1 / rows. The whole law is not it."""
    target, folder, model = pair
    drafter = Hetero(settings(folder), target.view)
    start = target.tokenizer(TEXT)["input_ids"]
    # the prefix after which the most mass lies on tokens the target does not have
    ids = min((start[:n] for n in range(2, 30)), key=lambda ids: shared_mass(drafter, model, ids))
    rows = 400
    middle = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    uniforms = torch.stack([middle, middle.flip(0)], dim=1)
    tree = propose_after(drafter, ids, uniforms, SAMPLED, rows=rows, depth=2)
    logits = logits_after(model, told(drafter.bridge, ids, len(ids)))
    exact = logits[drafter.bridge.draft_ids].softmax(-1)
    assert torch.allclose(tree.law_probs[0, 0], exact, atol=1e-5)
    assert tree.law_ids[0, 0].tolist() == drafter.bridge.target_ids
    counts = (tree.tokens[:, :1] == tree.law_ids[0, 0]).sum(0) / rows
    assert float((counts - exact).abs().max()) <= 1.1 / rows
    whole = logits.softmax(-1)[drafter.bridge.draft_ids]
    assert float((counts - whole).abs().max()) > 3 / rows
    # the second law is that after the first token drawn
    row = int((tree.tokens[:, 0] != tree.tokens[0, 0]).nonzero()[0])
    chosen = drafter.bridge.target_ids.index(int(tree.tokens[row, 0]))
    context = [*told(drafter.bridge, ids, len(ids)), drafter.bridge.draft_ids[chosen]]
    second = logits_after(model, context)[drafter.bridge.draft_ids].softmax(-1)
    assert torch.allclose(tree.law_probs[row, 1], second, atol=1e-5)


def shared_mass(drafter, model, ids):
    law = logits_after(model, told(drafter.bridge, ids, len(ids))).softmax(-1)
    return float(law[drafter.bridge.draft_ids].sum())


def test_confidence_is_the_best_shared_tokens_share_of_the_whole_law(pair):
    target, folder, model = pair
    drafter = Hetero(settings(folder), target.view)
    ids = target.tokenizer("nothing was")["input_ids"]
    assert propose_after(drafter, ids).confidence is None
    tree = propose_after(drafter, ids, sure=0.0)
    known = logits_after(model, told(drafter.bridge, ids, len(ids)))[: len(sentencepiece())]
    expected = known.softmax(-1)[drafter.bridge.draft_ids].max()
    assert tree.confidence[0, 0].item() == pytest.approx(expected.item(), abs=1e-6)


def test_drafting_ends_where_no_row_is_sure(pair):
    target, folder, _ = pair
    drafter = Hetero(settings(folder), target.view)
    ids = target.tokenizer(TEXT)["input_ids"][:30]
    told = propose_after(drafter, ids, sure=0.0, depth=8)
    surest = told.confidence[0, 1:].cummin(0).values
    cut = propose_after(drafter, ids, sure=float(surest[2]) + 1e-6, depth=8)
    length = 1 + int((surest > surest[2] + 1e-6).sum())
    assert cut.tokens.tolist() == told.tokens[:, : cut.tokens.shape[1]].tolist()
    assert cut.tokens.shape[1] == int(cut.num_nodes[0]) <= length < 8


def test_rows_with_laws_of_their_own_draw_at_their_own_temperatures(pair):
    target, folder, model = pair
    drafter = Hetero(settings(folder), target.view)
    ids = target.tokenizer("the quick dog")["input_ids"]
    laws = [Sampling(2.0), GREEDY, Sampling(0.5, top_k=3, logit_bias=((0, 5.0),))]
    uniforms = torch.full((3, K), 0.4, dtype=torch.float64)
    tree = propose_after(drafter, ids, uniforms, SamplingRows.of(laws, torch.device("cpu")), rows=3)
    logits = logits_after(model, told(drafter.bridge, ids, len(ids)))[drafter.bridge.draft_ids]
    for row, temperature in ((0, 2.0), (2, 0.5)):
        expected = (logits / temperature).softmax(-1)
        assert torch.allclose(tree.law_probs[row, 0], expected, atol=1e-5)
    assert tree.law_probs[1, 0].max() == 1.0


def test_the_targets_own_weights_under_other_ids_draft_what_it_would_say(tmp_path):
    """The whole way there and back: a permuted vocabulary, and every draft is right."""
    target = tiny_target()
    ids = torch.randint(200, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    answer = greedy(target, ids, K)
    order = sorted(tiny_tokenizer().get_vocab(), reverse=True)
    letters = [t for t in order if not t.startswith("<")]
    backend = tiny_tokenizer().backend_tokenizer
    other = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[]))
    other.pre_tokenizer, other.decoder = backend.pre_tokenizer, backend.decoder
    tokenizer = wrap(other, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in order if t[0] == "<"]})
    tokenizer.save_pretrained(tmp_path)
    model = build_tiny_model()
    mine, theirs = tiny_tokenizer().get_vocab(), tokenizer.get_vocab()
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            moved = weight.clone()
            for token, index in mine.items():
                if token in theirs:
                    moved[theirs[token]] = weight[index]
            weight.copy_(moved)
    model.save_pretrained(tmp_path)
    for method in ("tli", "slem"):
        drafter = Hetero(settings(tmp_path, method=method), target.view)
        assert not drafter.bridge.is_same
        tree = propose_after(drafter, ids)
        count = int(tree.num_nodes[0])
        assert count >= 1
        assert tree.tokens[0, :count].tolist() == answer[:count], method


@torch.no_grad()
def greedy(target, ids, count):
    known = target.spec.num_token_ids
    ids = list(ids)
    for _ in range(count):
        logits = target.forward_plainly(torch.tensor([ids])).logits[0, -1, :known]
        ids.append(int(logits.argmax()))
    return ids[-count:]


# ------------------------------------------------------------------ drafts by strings


def test_a_drafted_text_is_proposed_as_the_target_would_write_it(pair):
    target, folder, model = pair
    drafter = Hetero(settings(folder, method="slem"), target.view)
    ids = target.tokenizer("The quick brown")["input_ids"]
    context = told(drafter.bridge, ids, len(ids))
    known = len(sentencepiece())
    for _ in range(6):
        context = [*context, int(logits_after(model, context)[:known].argmax())]
    said = drafter.bridge.draft.bytes_of(context[-6:])
    tree = propose_after(drafter, ids, depth=6)
    got = tree.tokens[0, : int(tree.num_nodes[0])].tolist()
    assert got
    assert said.startswith(drafter.bridge.target.bytes_of(got))
    assert tree.law_probs.shape[2] == 1


def test_a_drafted_text_does_not_depend_on_uniforms_or_temperature(pair):
    target, folder, _ = pair
    drafter = Hetero(settings(folder, method="slem"), target.view)
    ids = target.tokenizer(TEXT)["input_ids"][:40]
    expected = propose_after(drafter, ids)
    ones = torch.full((1, K), 0.999, dtype=torch.float64)
    got = propose_after(drafter, ids, ones, SAMPLED)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert (got.law_probs == 1).all()


def test_text_goes_on_as_the_target_would_write_the_whole():
    mine, theirs = byte_level(size=400), sentencepiece()
    bridge = build_bridge(mine, theirs, NAMES)
    text = " in the warm sun"
    ids = mine(text)["input_ids"]
    drafts = bridge.draft.encode(b" warm sun")
    at = len(mine(" in the")["input_ids"])
    assert bridge.back(drafts, ids[:at]) == ids[at:]


def test_a_drafted_text_ends_at_a_special_token_the_target_lacks():
    mine, theirs = byte_level(), sentencepiece()
    bridge = build_bridge(mine, theirs, NAMES)
    the = theirs.convert_tokens_to_ids("▁the")
    unk, eos = theirs.unk_token_id, theirs.eos_token_id
    word = mine.convert_tokens_to_ids("Ġthe")
    assert bridge.back([the, unk, the], []) == [word]
    assert bridge.back([the, eos], []) == [word, mine.eos_token_id]
    assert bridge.back([unk], []) == []


# ------------------------------------------------------------------ pairs and limits


@pytest.mark.parametrize("rows", [261, 300, 384])
def test_padded_vocabularies_of_one_tokenizer_are_read_as_they_are(tmp_path, rows):
    """As in Qwen's family: one tokenizer, other numbers of rows. Also what draft_model proposes."""
    target = tiny_target()
    save(tmp_path, tiny_tokenizer(), vocab_size=rows)
    drafter = Hetero(settings(tmp_path, method="auto"), target.view)
    assert (drafter.method, drafter.bridge.is_same) == ("tli", True)
    assert drafter.bridge.target_ids == list(range(target.spec.num_token_ids))
    same = DraftModel(
        parse_settings(
            DraftModelSettings,
            {"kind": "draft_model", "num_draft_tokens": K, "start": "pretrained"}
            | {"model": str(tmp_path), "revision": None, "layers": None, "trainable": "all"}
            | {"objective": "forward_kl"}
            | {"normalise": "sequence", "reference": None, "learn_fraction": None},
        ),
        target.view,
    ).to(torch.float64)
    ids = torch.randint(200, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    assert propose_after(drafter, ids).tokens.tolist() == propose_after(same, ids).tokens.tolist()


def test_buffers_grow_when_a_text_takes_many_more_draft_tokens(tmp_path):
    """A draft of single bytes behind a target of long tokens."""
    target = target_with(byte_level(size=420))
    save(tmp_path, byte_level(size=256, eos="</s>"))
    drafter = Hetero(settings(tmp_path), target.view)
    ids = target.tokenizer("the quick brown fox jumps over the lazy dog" * 8)["input_ids"]
    assert len(told(drafter.bridge, ids, 1)) > len(ids) + 64 + K
    whole = propose_after(drafter, ids)
    piecewise = propose_after(drafter, ids, chunk=3)
    assert int(whole.num_nodes[0]) == K
    assert whole.tokens.tolist() == piecewise.tokens.tolist()


def test_rows_past_the_models_own_length_draft_nothing(tmp_path):
    target = target_with(byte_level())
    save(tmp_path, sentencepiece(), max_position_embeddings=20)
    drafter = Hetero(settings(tmp_path), target.view)
    ids = target.tokenizer(TEXT)["input_ids"]
    assert int(propose_after(drafter, ids[:5]).num_nodes[0]) == K
    assert int(propose_after(drafter, ids[:60]).num_nodes[0]) == 0


def test_auto_takes_strings_where_little_is_shared(tmp_path):
    target = target_with(byte_level(size=420))
    save(tmp_path, wordpiece(size=330))
    drafter = Hetero(settings(tmp_path, method="auto"), target.view)
    assert drafter.method == ("tli" if drafter.bridge.coverage >= 0.5 else "slem")


def test_it_holds_nothing_to_train_or_save(pair):
    target, folder, _ = pair
    drafter = Hetero(settings(folder), target.view)
    assert not list(drafter.parameters())
    assert not drafter.state_dict()


def test_a_missing_model_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"drafter\.model=.*nowhere: cannot load"):
        Hetero(settings(tmp_path / "nowhere"), tiny_target().view)


def test_a_tokenizer_written_in_an_unknown_way_is_refused(tmp_path):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    save(tmp_path, wrap(backend, eos_token="</s>"))
    with pytest.raises(ConfigError, match=r"draft model .*cannot read \(decoder: none\)"):
        Hetero(settings(tmp_path), tiny_target().view)


def test_a_draft_that_cannot_be_rolled_back_is_refused(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTarget, match=r"cannot draft: .*; choose another model"):
        Hetero(settings(tmp_path), tiny_target().view)
