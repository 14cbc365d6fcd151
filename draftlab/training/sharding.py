"""A drafter whose weights, gradients and moments are cut over the processes (FSDP2).

The whole drafter is one group: drafters use their matrices directly, not only through the modules
that hold them, so all are whole while the loss is computed and cut again after it. What shrinks
with the number of processes is what lies there between: weights, moments and running means.
Checkpoints know nothing of this: they hold whole tensors, so any number of processes resumes them.

AdamW moves shards alone and gives the numbers of whole weights. Muon's matrix products run over
shards; it computes them in bfloat16, so another order of summation shows in its last digits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.sharding import whole_tensor
from draftlab.training.loss import DrafterLoss


def shard_loss(loss: DrafterLoss, device: torch.device) -> FSDPModule:
    """Cut the drafter inside over all processes; its parameters are replaced by their shards."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    return fully_shard(loss, mesh=mesh)


def cut_like(
    tensor: Float[Tensor, "*S"] | Int[Tensor, "*S"], place: Float[Tensor, "*S"] | Int[Tensor, "*S"]
) -> Float[Tensor, "*S"] | Int[Tensor, "*S"]:
    """Cut a whole tensor as another one is cut; every process has it, so nothing is sent."""
    if not isinstance(place, DTensor):
        return tensor
    near = tensor.to(place.device)
    return distribute_tensor(near, place.device_mesh, place.placements, src_data_rank=None)


def gather_weights(drafter: nn.Module, *, is_kept: bool) -> dict[str, nn.Parameter]:
    """Put the drafter's sharded parameters together, in all processes at once.

    Args:
        drafter: cut or whole.
        is_kept: False in processes that only take part; they get nothing.

    Returns:
        Whole parameters by name, tied ones under every name; empty for a drafter that is whole.
    """
    found: dict[str, nn.Parameter] = {}
    seen: dict[int, nn.Parameter] = {}
    for name, parameter in drafter.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, DTensor):
            continue
        if id(parameter) not in seen:
            whole = whole_tensor(parameter.detach())
            seen[id(parameter)] = nn.Parameter(
                whole if is_kept else whole.new_empty(0), requires_grad=parameter.requires_grad
            )
        found[name] = seen[id(parameter)]
    return found if is_kept else {}


@contextmanager
def weights_in_place(drafter: nn.Module, weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let the drafter hold these parameters for a while, as if it had never been cut."""
    places = {}
    for name in weights:
        owner, _, last = name.rpartition(".")
        places[name] = (drafter.get_submodule(owner), last)
    shards = {name: module._parameters[last] for name, (module, last) in places.items()}
    try:
        for name, (module, last) in places.items():
            module._parameters[last] = weights[name]
        yield
    finally:
        for name, (module, last) in places.items():
            module._parameters[last] = shards[name]
