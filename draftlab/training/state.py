"""Every tensor that an optimizer step reads and changes, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from draftlab.drafters.base import Drafter
from draftlab.errors import CheckpointError
from draftlab.shapes import Tensor
from draftlab.targets.sharding import whole_tensor
from draftlab.training.sharding import cut_like


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Names tensors as weight/NAME, buffer/NAME, mean/NAME and optim/NAME/KEY.

    Attributes:
        drafter: what is trained.
        parameters: its trainable parameters by name.
        optimizers: those that move them.
        means: the running means of the weights by name; empty without.
    """

    drafter: Drafter
    parameters: Mapping[str, nn.Parameter]
    optimizers: Sequence[Optimizer]
    means: Mapping[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Give whole tensors: those themselves, not copies, unless they are cut over processes.

        All processes must call this together when they are.
        """
        names = {id(p): name for name, p in self.parameters.items()}
        moments = {
            f"optim/{names[id(parameter)]}/{key}": moment
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            for key, moment in state.items()
        }
        # in the order of names: the shards of one tensor must meet
        return {name: whole_tensor(x) for name, x in sorted((self._places() | moments).items())}

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Put saved tensors in place, bit for bit.

        Args:
            tensors: what `tensors` gave.
            folder: where they come from, for the message.

        Raises:
            CheckpointError: they are of another drafter.
        """
        places = self._places()
        moments = {name for name in tensors if name.startswith("optim/")}
        odd = sorted(places.keys() ^ (tensors.keys() - moments)) or [
            name for name, place in places.items() if place.shape != tensors[name].shape
        ]
        if odd:
            raise CheckpointError(
                f"{folder} holds the state of another drafter (first difference: {odd[0]}); resume "
                "with the drafter settings it was trained with"
            )
        for name, place in places.items():
            place.copy_(cut_like(tensors[name], place))
        owners = {
            id(p): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for name in sorted(moments):
            parameter_name, key = name.removeprefix("optim/").rsplit("/", 1)
            parameter, moment = self.parameters[parameter_name], tensors[name]
            # a step count is a scalar that stays on the CPU
            state = owners[id(parameter)].state[parameter]
            is_scalar = not moment.ndim
            state[key] = moment if is_scalar else cut_like(moment.to(parameter.device), parameter)

    def _places(self) -> dict[str, Tensor]:
        # other buffers are made anew from settings and target, whose rows do not belong here
        persistent = self.drafter.state_dict().keys()
        named: dict[str, Tensor] = {f"weight/{name}": p for name, p in self.parameters.items()}
        named |= {
            f"buffer/{name}": x for name, x in self.drafter.named_buffers() if name in persistent
        }
        return named | {f"mean/{name}": mean for name, mean in self.means.items()}
