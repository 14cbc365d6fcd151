import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from draftlab.data.loader import prepare, read_split, read_training_chats
from draftlab.data.packing import PackedRow, collate
from draftlab.data.settings import DataSettings
from draftlab.errors import DataError

ASKED = {"messages": [{"role": "user", "content": "Is it on?"}]}
CHAT = {"messages": [*ASKED["messages"], {"role": "assistant", "content": "It is."}]}
DEFAULTS = {
    "kind": "jsonl", "paths": (), "hub_name": None, "hub_subset": None, "hub_split": "train",
    "answers": "given",
    "messages_field": None, "domain": "own", "max_tokens": 512, "learn": "answers", "turns": "each",
    "on_bad_line": "fail", "validation_fraction": 0.0, "max_samples": None, "template_options": {},
}  # fmt: skip
VOCAB = 320


def settings_for(path, **changes):
    return DataSettings(**{**DEFAULTS, "paths": (str(path),), **changes})


def no_tokenizer():
    raise AssertionError("a tokenizer was asked for")


@pytest.fixture
def chatml(tokenizer_of):
    return tokenizer_of("tok_chatml")


def only(path, id_, into):
    """A file with one row of a case file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if json.loads(line)["id"] == id_)
    into.write_text(row, encoding="utf-8")
    return into


def test_the_report_says_what_was_kept_and_why_the_rest_was_not(cases, chatml, tmp_path):
    prepared = prepare(settings_for(cases / "nothing_to_learn.jsonl"), chatml, tmp_path, VOCAB)
    report = prepared.report
    assert (report.num_chats, report.num_samples) == (7, 2)
    assert report.dropped == {"no answer": 1, "empty answer": 3, "empty chat": 1}
    assert "nothing_to_learn.jsonl:4 (n4): empty chat" in report.dropped_examples
    learned = [chatml.decode(sample.ids[sample.mask]) for sample in prepared.samples]
    assert learned == ["learn me<|im_end|>", "learn me too<|im_end|>"]
    assert report.domains["own"]["learned"] == report.num_learned
    assert "dropped 3: empty answer" in report.describe()


def test_nothing_to_learn_stops_before_anything_else(cases, chatml, tmp_path):
    lines = (cases / "nothing_to_learn.jsonl").read_text(encoding="utf-8").splitlines()
    path = tmp_path / "empty.jsonl"
    path.write_text("\n".join(lines[:5]), encoding="utf-8")
    with pytest.raises(DataError, match=r"no token to learn in 5 chats.*empty answer \(3\)"):
        prepare(settings_for(path), chatml, tmp_path, VOCAB)


def test_text_that_is_no_rendered_chat_is_a_bad_line(cases, chatml, tmp_path):
    settings = settings_for(cases / "malformed.jsonl")
    with pytest.raises(DataError, match=r"malformed\.jsonl:7: no chat field"):
        prepare(settings, chatml, tmp_path, VOCAB)
    settings = settings_for(cases / "malformed.jsonl", on_bad_line="skip")
    report = prepare(settings, chatml, tmp_path, VOCAB).report
    assert [line.split(":")[1] for line in report.bad_lines] == ["3", "6", "7", "8", "9"]
    assert "skipped 5 bad lines" in report.describe()


def test_a_dropped_chat_is_named_by_its_line(chatml, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(CHAT) + '\n{"messages": []}\n', encoding="utf-8")
    report = prepare(settings_for(path), chatml, tmp_path, VOCAB).report
    assert "dropped 1: empty chat\n  own.jsonl:2 (own.jsonl:2): empty chat" in report.describe()


@pytest.mark.parametrize(
    ("lines", "keys", "said"),
    [
        ([], {}, r"own\.jsonl holds no chat; expected a JSON object a line"),
        (["", "  "], {}, r"own\.jsonl holds no chat"),
        ([ASKED], {}, r"no answer \(1\)(.|\n)*own\.jsonl:1(.|\n)*pass data\.answers=target"),
        ([{"messages": []}], {"answers": "target"}, r"no question \(1\)(.|\n)*a user's turn"),
    ],
)
def test_data_that_teaches_nothing_is_refused_without_a_tokenizer(lines, keys, said, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    with pytest.raises(DataError, match=said):
        read_training_chats(settings_for(path, **keys), tmp_path, no_tokenizer)


def test_chats_that_are_all_held_out_train_where_answers_are_given(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(CHAT), encoding="utf-8")
    given = settings_for(path, validation_fraction=0.999999)
    assert len(read_training_chats(given, tmp_path, no_tokenizer).conversations) == 1
    with pytest.raises(DataError, match=r"validation_fraction=0\.999999 holds out all 1 chats"):
        read_training_chats(given.model_copy(update={"answers": "target"}), tmp_path, no_tokenizer)


def test_a_turn_of_weight_0_is_refused_where_all_is_learned(chatml, tmp_path):
    path = tmp_path / "own.jsonl"
    unlearned = {"role": "assistant", "content": "Go away.", "weight": 0}
    turns = [*ASKED["messages"], unlearned, *CHAT["messages"]]
    path.write_text(json.dumps(CHAT) + "\n" + json.dumps({"messages": turns}), encoding="utf-8")
    kept = prepare(settings_for(path), chatml, tmp_path, VOCAB)
    assert kept.report.left_out == {"weight 0": 1}
    settings = settings_for(path, learn="all")
    said = (
        r"turns of weight 0 \(1\)(.|\n)*own\.jsonl:2 \(own\.jsonl:2\): turn 2\npass data\.learn=an"
    )
    with pytest.raises(DataError, match=said):
        prepare(settings, chatml, tmp_path, VOCAB)
    asked = settings.model_copy(update={"answers": "target"})
    with pytest.raises(DataError, match=said):
        read_training_chats(asked, tmp_path, no_tokenizer)
    # the target answers anew what stood at the end
    path.write_text(json.dumps({"messages": [*ASKED["messages"], unlearned]}), encoding="utf-8")
    assert len(read_training_chats(asked, tmp_path, no_tokenizer).conversations) == 1


HI, HO = "<|im_start|>user\nHi?<|im_end|>\n", "<|im_start|>assistant\nHo.<|im_end|>\n"


@pytest.fixture
def texts(tmp_path):
    """Write rows of rendered text, and give the settings that read them."""

    def write(*lines, **keys):
        path = tmp_path / "own.jsonl"
        path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
        return settings_for(path, **keys)

    return write


def test_rendered_text_is_read_before_the_target_as_it_is_for_training(texts, chatml, tmp_path):
    asked = []
    settings = texts(HI + HO, "no chat", HI + HO, on_bad_line="skip")
    early = read_training_chats(settings, tmp_path, lambda: asked.append(1) or chatml)
    prepared = prepare(settings, chatml, tmp_path, VOCAB)
    assert [chat.id for chat in early.conversations] == ["own.jsonl:1", "own.jsonl:3"]
    assert len(prepared.samples) == 2
    assert tuple(map(str, early.bad_lines)) == prepared.report.bad_lines
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("line", "keys", "said"),
    [
        ("no chat", {}, r"own\.jsonl:1: no chat field \(fields: text\); text is read only where"),
        (
            "no chat",
            {},
            r"answer marker of the target's chat template, '<\|im_start\|>assistant\\n'",
        ),
        (HI + "<|im_start|>assistant\n", {}, r"empty answer \(1\)(.|\n)*or give the rows as `mess"),
        (HI + HO, {"answers": "target"}, r"rendered text, whose last question is not cut out \(1"),
        (HI + HO, {"answers": "target"}, r"\ngive rendered text as `messages` or `prompt`$"),
    ],
)
def test_rendered_text_that_teaches_nothing_is_refused_early(
    line, keys, said, texts, chatml, tmp_path
):
    with pytest.raises(DataError, match=said):
        read_training_chats(texts(line, **keys), tmp_path, lambda: chatml)


@pytest.mark.parametrize("line", ["no chat", HI + "<|im_start|>assistant\n"])
def test_rendered_text_is_refused_early_in_the_words_of_training(line, texts, chatml, tmp_path):
    said = []
    for read in (
        lambda settings: read_training_chats(settings, tmp_path, lambda: chatml),
        lambda settings: prepare(settings, chatml, tmp_path, VOCAB),
    ):
        with pytest.raises(DataError) as error:
            read(texts(line))
        said.append(str(error.value))
    assert said[0] == said[1]


def test_advice_to_let_the_target_answer_leaves_rendered_text_out(texts, chatml, tmp_path):
    settings = texts(HI + "<|im_start|>assistant\n")
    with (tmp_path / "own.jsonl").open("a") as file:
        file.write("\n" + json.dumps(ASKED))
    with pytest.raises(DataError, match=r"answers=target(.|\n)*it cannot answer rendered text"):
        read_training_chats(settings, tmp_path, lambda: chatml)


def test_a_template_that_marks_no_answers_is_refused_for_text_early(texts, chatml, tmp_path):
    chatml.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}END"
    with pytest.raises(DataError, match="cannot be used for training rows"):
        read_training_chats(texts(HI + HO), tmp_path, lambda: chatml)


def test_without_a_tokenizer_rendered_text_counts_as_chats(texts, tmp_path):
    chats = read_training_chats(texts(HI + HO, "any"), tmp_path, lambda: None).conversations
    assert [chat.text for chat in chats] == [HI + HO, "any"]


@pytest.mark.parametrize("where", ["inside", "on the end marker", "just before it"])
def test_a_cut_keeps_the_mask_of_what_is_left(where, cases, chatml, tmp_path):
    path = only(cases / "multi_turn_mask.jsonl", "x1", tmp_path / "x1.jsonl")
    whole = prepare(settings_for(path), chatml, tmp_path, VOCAB).samples[0]
    second_end = (whole.ids == 269).nonzero()[4].item()  # system, user, answer, user, answer
    length = {"inside": second_end - 4, "on the end marker": second_end + 1,
              "just before it": second_end}[where]  # fmt: skip
    prepared = prepare(settings_for(path, max_tokens=length), chatml, tmp_path, VOCAB)
    cut = prepared.samples[0]
    assert torch.equal(cut.ids, whole.ids[:length])
    assert torch.equal(cut.mask, whole.mask[:length])
    assert cut.mask[-1]
    assert prepared.report.num_cut == 1
    assert f"1 samples were cut at {length} tokens" in prepared.report.describe()


def test_an_answer_beyond_the_limit_is_dropped_with_that_reason(cases, chatml, tmp_path):
    settings = settings_for(cases / "multi_turn_mask.jsonl", max_tokens=40)
    report = prepare(settings, chatml, tmp_path, VOCAB).report
    assert report.dropped == {"the answer lies beyond max_tokens=40": 2}
    assert report.num_samples == 1


def test_samples_are_cut_at_what_the_target_reads(cases, chatml, tmp_path):
    settings = settings_for(cases / "multi_turn_mask.jsonl", max_tokens=200)
    free = prepare(settings, chatml, tmp_path, VOCAB, max_positions=200)
    assert free.report.num_cut == 0
    prepared = prepare(settings, chatml, tmp_path, VOCAB, max_positions=100)
    assert not prepared.report.from_cache
    assert max(map(len, prepared.samples)) == 100 < max(map(len, free.samples))
    said = f"{prepared.report.num_cut} samples were cut at 100 tokens, the most that the target"
    assert said in prepared.report.describe()
    with pytest.raises(DataError, match=r"beyond the 8 tokens that the target(.|\n)*shorter chats"):
        prepare(settings, chatml, tmp_path, VOCAB, max_positions=8)


@pytest.mark.parametrize("pad", [269, None])
def test_end_tokens_are_learned_where_pad_equals_eos_or_no_pad_exists(
    pad, cases, tokenizer_of, tmp_path
):
    tokenizer = tokenizer_of("tok_pad_is_eos")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 269
    settings = settings_for(cases / "multi_turn_mask.jsonl", max_samples=2)
    saved = tokenizer.pad_token
    tokenizer.pad_token = None if pad is None else saved
    try:
        samples = prepare(settings, tokenizer, tmp_path, VOCAB).samples
        assert len(tokenizer) == 274
    finally:
        tokenizer.pad_token = saved
    batch = collate([PackedRow((sample,)) for sample in samples])
    assert int((batch.input_ids[batch.loss_mask] == 269).sum()) == 4
    padding = batch.segment_ids < 0
    assert padding.any()
    assert not (batch.loss_mask & padding).any()


def describe(prepared):
    return [(sample.ids.tolist(), sample.mask.tolist()) for sample in prepared.samples]


def test_equal_inputs_come_from_the_cache(cases, chatml, tmp_path):
    settings = settings_for(cases / "multi_turn_mask.jsonl", validation_fraction=0.4)
    first = prepare(settings, chatml, tmp_path, VOCAB)
    again = prepare(settings, chatml, tmp_path, VOCAB)
    assert (first.report.from_cache, again.report.from_cache) == (False, True)
    assert describe(again) == describe(first)
    assert [s.sample_id for s in again.held_out] == [s.sample_id for s in first.held_out]
    assert again.report.domains == first.report.domains


@pytest.mark.parametrize("change", ["content", "max_tokens", "template", "tokenizer", "turns"])
def test_whatever_changes_the_rows_gives_fresh_ones(change, cases, tokenizer_of, tmp_path):
    path = tmp_path / "rows.jsonl"
    shutil.copy(cases / "multi_turn_mask.jsonl", path)
    tokenizer = tokenizer_of("tok_chatml")
    first = prepare(settings_for(path), tokenizer, tmp_path, VOCAB)
    changes = {}
    if change == "content":
        stat = path.stat()
        text = path.read_text(encoding="utf-8").replace("Closed.", "Closes.")
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_size == stat.st_size
    elif change == "max_tokens":
        changes = {"max_tokens": 60}
    elif change == "template":
        tokenizer.chat_template = "Chat: " + tokenizer.chat_template
    elif change == "tokenizer":
        tokenizer = tokenizer_of("tok_bos_twice")
    else:
        changes = {"turns": "last"}
    fresh = prepare(settings_for(path, **changes), tokenizer, tmp_path, VOCAB)
    assert not fresh.report.from_cache
    assert describe(fresh) != describe(first)


def test_another_tokenizer_with_the_same_template_gives_fresh_rows(cases, tokenizer_of, tmp_path):
    settings = settings_for(cases / "multi_turn_mask.jsonl")
    prepare(settings, tokenizer_of("tok_chatml"), tmp_path, VOCAB)
    other = tokenizer_of("tok_bos_twice")
    other.chat_template = tokenizer_of("tok_chatml").chat_template
    assert not prepare(settings, other, tmp_path, VOCAB).report.from_cache


def test_a_file_moved_elsewhere_is_still_the_same_data(cases, chatml, tmp_path):
    prepare(settings_for(cases / "multi_turn_mask.jsonl"), chatml, tmp_path, VOCAB)
    shutil.copy(cases / "multi_turn_mask.jsonl", tmp_path / "multi_turn_mask.jsonl")
    settings = settings_for(tmp_path / "multi_turn_mask.jsonl")
    assert prepare(settings, chatml, tmp_path, VOCAB).report.from_cache


def test_ids_beyond_the_targets_rows_are_refused_also_from_the_cache(cases, chatml, tmp_path):
    settings = settings_for(cases / "multi_turn_mask.jsonl")
    prepare(settings, chatml, tmp_path, 270)
    with pytest.raises(DataError, match=r"token id 269 \('<\|im_end\|>'\).*269 embedding rows"):
        prepare(settings, chatml, tmp_path, 269)


def test_chats_of_a_rewriting_template_are_counted(cases, tokenizer_of, tmp_path):
    tokenizer = tokenizer_of("tok_think_history")
    path = cases / "think_history.jsonl"
    each = prepare(settings_for(path), tokenizer, tmp_path, VOCAB).report
    assert (each.num_samples, each.num_split_chats) == (5, 2)
    last = prepare(settings_for(path, turns="last"), tokenizer, tmp_path, VOCAB).report
    assert (last.num_samples, last.left_out) == (3, {"an earlier answer (turns=last)": 2})


def write_rows(path, count):
    rows = [
        {
            "id": f"r{i}",
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": f"a{i}"},
            ],
        }
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_held_out_chats_stay_held_out_when_rows_are_added(chatml, tmp_path):
    held_out = []
    for count in (40, 60):
        path = write_rows(tmp_path / "rows.jsonl", count)
        prepared = prepare(settings_for(path, validation_fraction=0.25), chatml, tmp_path, VOCAB)
        held_out.append({sample.sample_id for sample in prepared.held_out})
        assert len(prepared.held_out) + len(prepared.samples) == count
    assert held_out[0] == {i for i in held_out[1] if i < 40}
    assert 3 <= len(held_out[0]) <= 20


def test_splits_read_as_text_are_those_of_the_samples(chatml, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 40)
    settings = settings_for(path, validation_fraction=0.25)
    prepared = prepare(settings, chatml, tmp_path, VOCAB)
    chats = read_split(settings, "validation", tmp_path, chatml).conversations
    assert [int(chat.id[1:]) for chat in chats] == [s.sample_id for s in prepared.held_out]
    assert len(read_split(settings, "train", tmp_path).conversations) == len(prepared.samples)
    with pytest.raises(DataError, match="evaluation was asked for"):
        read_split(settings, "evaluation", tmp_path)


def test_progress_is_told_chat_by_chat(cases, chatml, tmp_path):
    seen = []
    prepare(
        settings_for(cases / "multi_turn_mask.jsonl"), chatml, tmp_path, VOCAB,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_texts_survive_a_platform_that_thinks_in_ascii(cases, tmp_path):
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from transformers import AutoTokenizer\n"
        "from draftlab.data.loader import prepare\n"
        "from draftlab.data.settings import DataSettings\n"
        "settings, cases, cache = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])\n"
        "tokenizer = AutoTokenizer.from_pretrained(cases / 'tok_chatml')\n"
        "found = prepare(DataSettings(**settings), tokenizer, cache, 320)\n"
        "print(json.dumps([tokenizer.decode(s.ids[s.mask]) for s in found.samples]))\n"
    )
    settings = settings_for(cases / "unicode_spans.jsonl").model_dump(mode="json")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(settings), str(cases), str(tmp_path)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = json.loads((cases / "unicode_spans.expected.json").read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == ["".join(texts) for texts in expected.values()]


def test_the_shipped_prompts_need_the_targets_answers_first(chatml, tmp_path):
    settings = DataSettings(
        **{**DEFAULTS, "kind": "builtin", "answers": "target", "max_samples": 5}
    )
    assert len(read_split(settings, "train", tmp_path).conversations) == 5
    with pytest.raises(DataError, match=r"hold no answers.*pass data\.answers=target"):
        prepare(settings, chatml, tmp_path, VOCAB)
