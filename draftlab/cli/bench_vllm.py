"""vLLM's side of `draftlab bench decode`, for an interpreter that has vLLM and knows no draftlab.

`PYTHON bench_vllm.py ASKED.json ANSWERED.json`. In: a model's folder, prompts as ids, limits. Out:
ids and seconds of every answer, or the error it ended with. Greedy, one prompt at a time, in this
very process: no other one to wait for.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Load the model and time every prompt, after a few that are not timed."""
    import torch
    import vllm  # pyright: ignore[reportMissingImports]  # a peer, never a dependency

    model = vllm.LLM(
        model=asked["model"],
        revision=asked["revision"],
        trust_remote_code=asked["trusts_code"],
        dtype=asked["dtype"],
        skip_tokenizer_init=True,  # ids in, ids out
        max_model_len=asked["max_length"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=asked["is_eager"],
        **asked["drafting"],
    )
    limits = vllm.SamplingParams(
        **asked["sampling"],
        logit_bias=dict(asked["logit_bias"]) or None,  # JSON has no numbers as keys
        detokenize=False,
    )

    def one(ids: list[int]) -> tuple[list[int], float]:
        began = time.perf_counter()
        out = model.generate([{"prompt_token_ids": ids}], limits, use_tqdm=False)
        return list(out[0].outputs[0].token_ids), time.perf_counter() - began

    for ids in asked["prompts"][: asked["warmup_prompts"]]:
        one(ids)
    answers = [[one(ids) for ids in asked["prompts"]] for _ in range(asked["repeats"])]
    return {
        "version": vllm.__version__,
        "threads": torch.get_num_threads(),
        "answers": answers,
    }


def answer_or_error(asked: dict[str, Any]) -> dict[str, Any]:
    """Say what went wrong as data: the last line on stderr is often another's."""
    try:
        return answer(asked)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(answer_or_error(given)), encoding="utf-8")
