"""A target whose decoder layers are cut over processes (FSDP2), for passes without gradients.

Every process keeps its share of each layer. A pass puts one layer together, runs it and lets go of
it; weights and passes are the same bits as uncut. Embedding, LM head and final norm stay whole in
every process: drafters read them at any time, alone.

A pass is therefore a matter of all processes: one that stays away leaves the others waiting. Two
rules keep them together, and neither needs processes that compute the same bits:
- where all work on batches of their own, each runs one pass a batch, or an empty one (`join`);
- what the first process does alone (answering prompts, probing) goes through `run_on_first`: it
  tells the others of each pass, and they put the same layers together and compute nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.adapter import Anatomy, find_anatomy

T = TypeVar("T")
_DONE, _PASS = 0, 1


class LayerShards:
    """The cut layers of a target, and the way its processes stay together.

    Attributes:
        num_processes: over which each layer is cut.
    """

    def __init__(self, anatomy: Anatomy, device: torch.device) -> None:
        """Look after layers that `cut_layers` has cut.

        Args:
            anatomy: of the model; its base runs once a pass, whichever way the pass takes.
            device: of this process.
        """
        self.num_processes = distributed.get_world_size()
        self._layers: list[Any] = list(anatomy.layers)
        self._device = device
        self._is_leading = False
        anatomy.base.register_forward_pre_hook(self._announce)

    def run_on_first(self, action: Callable[[], T]) -> T | None:
        """Let the first process do something with the target; all must come here together.

        Returns:
            What the action gave, in the first process; None in the others.
        """
        if distributed.get_rank() != 0:
            while self._hear() == _PASS:
                self.join()
            return None
        self._is_leading = True
        try:
            result = action()
        finally:
            self._is_leading = False
        # not after an error: the others may be amid a pass, and end with this process
        self._tell(_DONE)
        return result

    def join(self) -> None:
        """Take part in a pass of the other processes without one of one's own."""
        for layer in self._layers:
            layer.unshard()
            layer.reshard()

    def _announce(self, module: nn.Module, args: Any) -> None:
        if self._is_leading:
            self._tell(_PASS)

    def _tell(self, word: int) -> None:
        distributed.broadcast(torch.tensor([word], device=self._device), src=0)

    def _hear(self) -> int:
        word = torch.empty(1, dtype=torch.int64, device=self._device)
        distributed.broadcast(word, src=0)
        return int(word)


def cut_layers(model: PreTrainedModel, device: torch.device) -> LayerShards:
    """Freeze a model in host memory and move it to a device, its decoder layers cut on the way.

    A device holds at most one whole layer beside its shards and what is not cut. Host memory: the
    safetensors of a checkpoint are mapped, so its pages are read layer by layer and shared by the
    processes of a machine, but weights in another dtype than the file's are a whole copy in each.

    Raises:
        ConfigError: there are no processes to cut over.
        UnsupportedTarget: layers that share weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    require_processes()
    model.eval().requires_grad_(False)
    anatomy = find_anatomy(model)
    _refuse_shared(anatomy, model)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in anatomy.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    _move_rest(model, device)
    rest = {weight for weight in anatomy.base.parameters() if not isinstance(weight, DTensor)}
    # cuts nothing more: the layers then share streams, and one is gathered while another computes
    fully_shard(anatomy.base, mesh=mesh, ignored_params=rest)
    shards = LayerShards(anatomy, device)
    # buffers of the first gathering stay: made here, they serve inside inference mode and outside
    shards.join()
    return shards


def require_processes() -> None:
    """Refuse to cut where one process is alone.

    Raises:
        ConfigError: there are no processes to cut over.
    """
    have_met = distributed.is_available() and distributed.is_initialized()
    if not have_met or distributed.get_world_size() == 1:
        raise ConfigError(
            "hardware.shard=target cuts a target over processes, and there is one; pass "
            "hardware.shard=none, or hardware.num_processes=N"
        )


def whole_tensor(
    tensor: Float[Tensor, "*S"] | Int[Tensor, "*S"],
) -> Float[Tensor, "*S"] | Int[Tensor, "*S"]:
    """Put shards together, in all processes at once; a tensor that is whole stays itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _refuse_shared(anatomy: Anatomy, model: PreTrainedModel) -> None:
    owners: dict[int, int] = {}
    for number, layer in enumerate(anatomy.layers):
        for weight in layer.parameters():
            if owners.setdefault(id(weight), number) != number:
                raise UnsupportedTarget(
                    f"layers {owners[id(weight)]} and {number} of {type(model).__name__} share "
                    "weights, so they cannot be cut one by one; pass hardware.shard=none"
                )


def _move_rest(model: PreTrainedModel, device: torch.device) -> None:
    """Move what was not cut; a tensor that stands in two places stays one."""
    for weight in model.parameters():
        if not isinstance(weight, DTensor):
            weight.data = weight.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
