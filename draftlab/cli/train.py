"""`draftlab train`: a drafter for a target."""

import shlex
from collections.abc import Sequence

from draftlab.cli.words import split_words
from draftlab.settings.compose import compose

HELP = """usage: draftlab train [recipe=FAMILY/NAME] [key=value ...]

Composes the settings, makes outputs/RECIPE/TIME-ID/ (without a recipe outputs/adhoc/TIME-ID/), lets
the target answer the prompts where the data asks for that, trains, and keeps checkpoints. The same
command after a kill goes on where it stopped; a finished one starts anew.

  recipe=eagle3/smollm2-demo   a ready-made choice of everything below (draftlab recipes)
  target=tiny|demo|local|hub   the frozen model; target.name=FOLDER or HUB-ID
  drafter=KIND                 medusa, hydra, eagle, eagle3, peagle, mtp, dflash, dspark or
                               draft_model; its keys as drafter.KEY=VALUE
  data=builtin|jsonl|hub       data.paths=my.jsonl, data.answers=target|given
  optim.lr=1e-3 train.max_minutes=10 train.max_steps=500
  init=DRAFTER                 train an existing drafter further: it keeps its own drafter.KEYs
                               and its draft vocabulary
  adapter=lora optim=adamw     leave it as it is and train a small adapter, saved by itself
  resume=RUN                   go on with one run; resume=never starts anew where the same words
                               would go on, such as after a change of the data
  hardware=cpu|single_gpu|ddp  tracker=none|wandb|tensorboard  seed=0

examples:
  draftlab train                                                   under a minute, nothing needed
  draftlab train recipe=eagle3/smollm2-demo train.max_minutes=20
  draftlab train recipe=company/finetune data.paths=support.jsonl init=outputs/.../RUN
  draftlab train recipe=company/adapter data.paths=support.jsonl init=outputs/.../RUN
"""


def run(args: Sequence[str]) -> int:
    """Train, and say what to do with the result."""
    _, words = split_words(args, most=0)
    compose("train", words)  # a misspelt word is told before torch is loaded
    from draftlab.cli.launch import launch_training

    done = launch_training(words)
    best = done.pointed("best") or done.pointed("latest")
    print(f"run {done.path}")
    print(f"drafter {best}")
    print(f"next: {shlex.join(['draftlab', 'eval', f'drafter={done.path}'])}")
    return 0
