"""vLLM's side of `draftlab bench decode`, for an interpreter that has vLLM and knows no draftlab.

`PYTHON bench_vllm.py ASKED.json ANSWERED.json`. In: a model's folder, prompts as ids, limits. Out:
ids and seconds of every answer. Greedy, one prompt at a time.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Load the model and time every prompt, after a few that are not timed."""
    import vllm  # pyright: ignore[reportMissingImports]  # a peer, never a dependency

    extra: dict[str, Any] = {}
    if asked["ngram_tokens"]:
        extra["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": asked["ngram_tokens"],
            "prompt_lookup_max": 4,
        }
    model = vllm.LLM(
        model=asked["model"],
        revision=asked["revision"],
        dtype=asked["dtype"],
        max_model_len=asked["max_length"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        **extra,
    )
    limits = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=asked["max_new_tokens"],
        stop_token_ids=asked["eos_ids"],
        detokenize=False,
    )

    def one(ids: list[int]) -> tuple[list[int], float]:
        began = time.perf_counter()
        out = model.generate([{"prompt_token_ids": ids}], limits, use_tqdm=False)
        return list(out[0].outputs[0].token_ids), time.perf_counter() - began

    for ids in asked["prompts"][: asked["warmup_prompts"]]:
        one(ids)
    answers = [[one(ids) for ids in asked["prompts"]] for _ in range(asked["repeats"])]
    return {"version": vllm.__version__, "answers": answers}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(answer(given)), encoding="utf-8")
