"""`draftlab bench`: speed and memory, measured; which bench is the first word."""

from collections.abc import Sequence

from draftlab.cli.words import split_words
from draftlab.errors import ConfigError

HELP = """usage: draftlab bench decode [target=demo] [drafter=DRAFTER] [key=value ...]

Times, prompt by prompt in turns and in one process: transformers' generate, its prompt lookup,
draftlab without a drafter, draftlab with n-gram drafting, and the drafters named. Batch 1, greedy,
the whole call timed (prefill included) for every arm. vLLM joins the table where it is installed.

  drafter=RUN                  a further arm: a trained drafter, or a kind; drafters=[A,B]: several
  decode.num_draft_tokens=4 decode.tree=...   of the drafters named; n-gram drafting keeps its own
  eval.prompts=builtin         or a JSONL file with a domain field
  bench.prompts=12             prompts timed, domains in turn
  bench.tokens=128             length limit of an answer, tokens
  bench.repeats=1              times each prompt is timed in each arm
  bench.vllm_python=PATH       interpreter that has vLLM; by default this one
  bench.out=FILE.json          default: OUTPUTS/bench/decode-TIME.json

Prints for every arm tokens per second, ratios with 95 % intervals over prompts, tau, the times of
its parts as shares of a plain step, the speedup those predict beside the measured one, the
decoder's own share of a round, and peak memory. Predictions off by more than 10 % are named.

examples:
  draftlab bench decode target=demo
  draftlab bench decode drafter=outputs/demo/20261129-101500-ab12

usage: draftlab bench loss [key=value ...]

Peak memory, time and error of the chunked loss beside the plain one; on its own, no target needed.

  rows=8192 vocab=151936 draft_vocab=32000,full width=256 depths=1
                             predictions, target and draft vocabularies, hidden size, depths
  objectives=forward_kl,lk_hybrid   names as in a drafter's yaml, or all
  plain_rows=512             predictions of the plain form (all of its logits are alive at once)
  error_rows=512 error_vocab=16000  size at which gradients are compared with the plain form's
  dtype=float32 device=cpu threads=0   of states and heads; 0: torch's choice

usage: draftlab bench gpu [out=FOLDER] [minutes=8] [--cpu-smoke]

What a CUDA device gives, in one run of about 8 minutes on an H200-class card, with a random target
built there: pass times, bandwidth, exactness checks, the sampler, one head trained and decoded.
Without draftlab's command: python -m draftlab.cli.bench_gpu. --cpu-smoke runs everything tiny on
the processor. Writes bench_gpu.json and bench_gpu.md. Figures of a GPU are still to be measured.
"""


def run(args: Sequence[str]) -> int:
    """Run one bench."""
    if list(args[:1]) == ["gpu"]:
        from draftlab.cli.bench_gpu import main as run_gpu

        return run_gpu(list(args[1:]))
    things, words = split_words(args, most=1)
    if things == ["loss"]:
        from draftlab.cli.bench_loss import run as run_loss

        return run_loss(words)
    if things != ["decode"]:
        named = " ".join(things) or "nothing"
        raise ConfigError(f"bench what? got {named}; expected decode, loss or gpu")
    from draftlab.cli.bench_decode import run as run_decode

    return run_decode(words)
