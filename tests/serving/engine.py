"""vLLM's side of the parity tests: run by an interpreter that has vLLM, and knows no draftlab.

`PYTHON engine.py ASKED.json ANSWERED.json RUNNER`, the runner first or second. In: prompts, and a
list of what to try one after the other: a target's folder, keys to add to its config, and a
speculative config; perhaps hidden states and tokens before them, to ask a confidence head about.
Out, in their order: of each, the tokens of every answer and vLLM's counters, what the confidence
head says, or the error that it ended with.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)

if sys.argv[3] == "second":
    import triton_on_cpu  # noqa: F401 - changes what vLLM finds

import torch
import vllm
from vllm.distributed import cleanup_dist_env_and_memory

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def answer(asked, head):
    model = vllm.LLM(
        model=head["target"],
        hf_overrides=head["overrides"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=head["speculative"],
    )
    before = counters(model)
    limits = vllm.SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    out = model.generate(prompts, limits, use_tqdm=False)
    tokens = [list(one.outputs[0].token_ids) for one in out]
    after = counters(model)
    sure = model.collective_rpc(confidence, args=(head["judged"],))[0] if head["judged"] else None
    del model
    gc.collect()
    cleanup_dist_env_and_memory()
    per_position = [a - b for a, b in zip(after[3], before[3] or [0] * len(after[3]), strict=True)]
    return {
        "tokens": tokens,
        "num_drafts": after[0] - before[0],
        "per_position": per_position,
        "confidence": sure,
    }


def confidence(worker, judged):
    """Ask the drafter of a worker how likely it thinks its tokens, whatever they are, to be accepted."""
    drafter = worker.model_runner.speculator.model
    with torch.inference_mode():
        before = drafter.markov_embed(torch.tensor(judged["previous"]))
        return drafter.compute_confidence(torch.tensor(judged["hidden"]), before).tolist()


def counters(model):
    """Read them; they belong to the process, so an earlier model's are still in."""
    found = {metric.name: metric for metric in model.get_metrics()}
    read = []
    for name in COUNTERS:
        metric = found.get(f"vllm:spec_decode_{name}")
        read.append(getattr(metric, "values", None) or getattr(metric, "value", 0))
    return read


def tried(asked, head):
    try:
        return answer(asked, head)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = [tried(given, head) for head in given["heads"]]
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
