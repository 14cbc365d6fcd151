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
  bench.vllm_python=PATH       interpreter that has vLLM; by default $SERVING_PYTHON, else this one
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

usage: draftlab bench families [minutes=5] [families=[A,B]] [key=value ...]

Trains every family that has a recipe for the demo target on the same answers for the same minutes,
evaluates each as draftlab eval does, and sets them side by side: parameters, minutes, K, tau pooled
and by domain, t_draft/t_AR, decode speedup, and which checkpoint tau, modelled tokens/s and loss
would choose. The target answers once, for all. After each family OUTPUTS/bench-families/TIME holds
table.md, table.json and report.html. The same words after a kill go on where it stopped, and with
further families add those; a family whose recipe has changed since is trained again.

  minutes=5                    of optimizer steps, each family; probes and evaluation on top
  families=[eagle3,medusa]     all when left out
  key=value                    goes to all families: optim.lr=1e-3 regenerate.max_new_tokens=64
  FAMILY.key=value             goes to one: eagle3.drafter.unroll_steps=2
  data.max_samples=768         training prompts; eval.prompts_per_domain=8 eval.max_new_tokens=40
  eval=domains                 a longer evaluation, also of what is trained; else eval=brief
  target=...                   another target: families as conf/drafter has them, without a recipe
  fresh=true                   start anew, though an equal bench is there

examples:
  draftlab bench families
  draftlab bench families families=[eagle3,eagle,medusa] minutes=10 data.max_samples=768

usage: draftlab bench train [target=tiny] [families=[A,B]] [key=value ...]

Samples/s, tokens/s and peak memory of each family's optimizer steps after warm-up, each in a
process of its own. target=demo takes each family's recipe, other targets conf/drafter.

  bench.steps=5 bench.warmup=2           optimizer steps that count, and before them
  bench.sample_tokens=192 bench.answer_tokens=96   a sample's length, and how much of it is learned;
                               no sample is longer than a row (train.row_tokens) or the target reads
  train.batch_rows=4 train.row_tokens=512 train.precision=bf16 optim=muon ...   as in training
  regenerate.capture_features=false      the target computes its hidden states in every step
  bench.out=FILE.json                    default: OUTPUTS/bench/train-TIME.json

usage: draftlab bench features [bench.dtypes=bf16,fp8] [key=value ...]

Whether shortened hidden states cost acceptance: the words of draftlab train, trained once for each
dtype on the same answers, decoded on the prompts of eval. Exit code 3: an arm's tau lies outside
the 95 % interval of the first one's; 4: too few prompts for an interval, or no draft token accepted
in either arm.

  bench.dtypes=bf16,fp8        target | bf16 | fp8; the first is what the others are compared with
  bench.out=FILE.json          default: OUTPUTS/bench/features-TIME.json

example:
  draftlab bench features recipe=eagle3/smollm2-demo train.max_minutes=null train.max_steps=300

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
    if things == ["families"]:
        from draftlab.cli.bench_families import run as run_families

        return run_families(words)
    if things == ["features"]:
        from draftlab.cli.bench_features import run as run_features

        return run_features(words)
    if things == ["train"]:
        from draftlab.cli.bench_train import run as run_train

        return run_train(words)
    if things != ["decode"]:
        named = " ".join(things) or "nothing"
        raise ConfigError(
            f"bench what? got {named}; expected decode, families, features, loss, train or gpu"
        )
    from draftlab.cli.bench_decode import run as run_decode

    return run_decode(words)
