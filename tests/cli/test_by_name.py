"""The decoder from Python, in five lines."""

import pytest

import draftlab
from draftlab.sampling import Sampling

FIVE_LINES = """
import draftlab
target = draftlab.open_target("target=tiny")
decoder = draftlab.open_decoder(target, "ngram", "decode.batch_size=8")
prompts = [draftlab.encode_question(target, text) for text in ("A prime number?", "A square?")]
for answer in decoder.generate(prompts, max_new_tokens=16):
    print(target.tokenizer.decode(answer.output_ids))
"""


@pytest.fixture(scope="module")
def target():
    return draftlab.open_target("target=tiny", "target.kernels=reference")


def test_five_lines_answer(capsys):
    exec(compile(FIVE_LINES, "five lines", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_drafter_by_name_changes_nothing_but_the_speed(target):
    prompts = [draftlab.encode_question(target, text) for text in ("One?", "And another one?")]
    answers = [
        draftlab.open_decoder(target, drafter, "decode.max_new_tokens=8").generate(prompts)
        for drafter in (None, "ngram")
    ]
    assert [a.output_ids for a in answers[0]] == [a.output_ids for a in answers[1]]


def test_prompts_of_one_batch_may_be_sampled_each_in_its_own_way(target):
    prompt = draftlab.encode_question(target, "One?")
    laws = [Sampling(), Sampling(0.9, top_k=8, presence_penalty=0.5), Sampling(min_new_tokens=3)]
    decoder = draftlab.open_decoder(target, "ngram", "decode.batch_size=3")
    answers = decoder.generate([prompt] * 3, sampling=laws, max_new_tokens=8)
    alone = [
        decoder.generate([prompt], sampling=law, max_new_tokens=8, row_keys=[i])[0]
        for i, law in enumerate(laws)
    ]
    assert [a.output_ids for a in answers] == [a.output_ids for a in alone]


def test_an_answer_ends_before_its_stop_string(target):
    whole = draftlab.answer("One?", target, None, "decode.max_new_tokens=12")
    stop = next(c for c in whole[2:] if c.isascii() and c.isalnum())
    words = ["decode.max_new_tokens=12", f'decode.stop=["{stop}"]']
    assert draftlab.answer("One?", target, None, *words) == whole[: whole.index(stop)]
