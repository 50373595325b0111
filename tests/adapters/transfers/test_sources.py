"""Sources: what is yielded, under which name, and what is refused."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adapters.transfers import ModuleSource, StateDictSource
from lifecycle.errors import UnusableWeights


class Tied(nn.Module):
    """An embedding tied to a head, a persistent buffer and a temporary one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)
        self.lm_head = nn.Linear(3, 4, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("running", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Sharded(torch.Tensor):
    """Stands in for a DTensor: its own values are only a part."""

    def full_tensor(self) -> torch.Tensor:
        """Gather."""
        return torch.full((4,), 7.0)


def test_a_module_yields_its_parameters_in_order_and_tied_ones_once() -> None:
    """Tied weights come under the name that comes first, as in a Hugging Face checkpoint."""
    source = ModuleSource(Tied())
    assert [name for name, _ in source.tensors()] == ["embed_tokens.weight", "norm.weight", "norm.bias"]


def test_parameters_that_share_memory_without_being_one_object_come_once() -> None:
    """Weights tied through their data are recognised too."""
    module = Tied()
    module.lm_head.weight = nn.Parameter(module.embed_tokens.weight.data)
    assert [name for name, _ in ModuleSource(module).tensors()] == ["embed_tokens.weight", "norm.weight", "norm.bias"]


def test_persistent_buffers_are_yielded_on_request() -> None:
    """Buffers of the checkpoint follow the parameters where asked for, temporary ones never."""
    assert [name for name, _ in ModuleSource(Tied(), buffers=True).tensors()][3:] == ["running"]


def test_a_module_source_serves_every_version() -> None:
    """The module is read anew each time, without a copy."""
    module = nn.Linear(2, 2, bias=False)
    source = ModuleSource(module)
    with torch.no_grad():
        module.weight.fill_(3.0)
    ((_, tensor),) = source.tensors()
    assert (tensor.tolist(), tensor.data_ptr(), tensor.requires_grad) == (
        [[3.0, 3.0], [3.0, 3.0]],
        module.weight.data_ptr(),
        False,
    )


def test_names_are_those_of_the_tensors() -> None:
    """`names()` tells beforehand exactly what `tensors()` yields."""
    for source in (
        ModuleSource(Tied(), buffers=True, rename=lambda name: None if "bias" in name else f"model.{name}"),
        StateDictSource(Tied().state_dict(), rename={"running": "stopped"}),
    ):
        assert list(source.names()) == [name for name, _ in source.tensors()]


def test_names_are_translated_and_left_out() -> None:
    """A function may rename and leave out, a mapping renames what it knows."""
    weights = {"a": torch.zeros(1), "b": torch.zeros(1)}
    assert list(StateDictSource(weights, rename={"a": "x"}).names()) == ["x", "b"]
    assert list(StateDictSource(weights, rename=lambda name: None if name == "a" else name).names()) == ["b"]


def test_a_tied_copy_comes_under_its_own_name_where_the_first_is_left_out() -> None:
    """Leaving out one name of tied weights leaves the other."""
    weight = torch.zeros(2)
    source = StateDictSource({"a": weight, "b": weight}, rename=lambda name: None if name == "a" else name)
    assert list(source.names()) == ["b"]


def test_slices_of_one_storage_are_not_tied() -> None:
    """Parts of a fused parameter come each on their own, although they share a storage."""
    fused = torch.arange(6.0)
    source = StateDictSource({"q": fused[:2], "k": fused[2:4], "v": fused[4:]})
    assert [(name, tensor.tolist()) for name, tensor in source.tensors()] == [
        ("q", [0.0, 1.0]),
        ("k", [2.0, 3.0]),
        ("v", [4.0, 5.0]),
    ]


def test_only_floating_point_is_converted() -> None:
    """A dtype is applied to weights, not to indices."""
    source = StateDictSource({"w": torch.ones(1), "i": torch.ones(1, dtype=torch.int64)}, dtype=torch.bfloat16)
    assert [tensor.dtype for _, tensor in source.tensors()] == [torch.bfloat16, torch.int64]


def test_a_transposed_tensor_is_made_contiguous() -> None:
    """What is yielded can travel in place."""
    ((_, tensor),) = StateDictSource({"w": torch.arange(4.0).reshape(2, 2).T}).tensors()
    assert (tensor.is_contiguous(), tensor.tolist()) == (True, [[0.0, 2.0], [1.0, 3.0]])


def test_sharded_tensors_are_gathered_when_their_turn_comes() -> None:
    """A tensor with `full_tensor()` is gathered, and not for its name alone."""
    source = StateDictSource({"w": torch.zeros(2).as_subclass(Sharded)}, dtype=torch.bfloat16)
    assert list(source.names()) == ["w"]
    ((_, tensor),) = source.tensors()
    assert (tensor.tolist(), tensor.dtype) == ([7.0] * 4, torch.bfloat16)


def test_a_module_sharded_by_fsdp2_is_gathered() -> None:
    """Parameters that `fully_shard` turned into DTensors come whole and under their own names."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        module = nn.Linear(2, 2)
        weight = module.weight.detach().clone()
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        assert hasattr(module.weight, "full_tensor")
        got = dict(ModuleSource(module).tensors())
        assert list(got) == ["weight", "bias"]
        assert type(got["weight"]) is torch.Tensor
        assert torch.equal(got["weight"], weight)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (StateDictSource({}), "no tensors"),
        (ModuleSource(nn.ReLU()), "no tensors"),
        (StateDictSource({"w": torch.empty(1, device="meta")}), "meta device"),
        (StateDictSource({"w": 3}), "'w' is no tensor but of type int"),  # type: ignore[dict-item]
        (StateDictSource({"a": torch.zeros(1), "b": torch.ones(1)}, rename={"b": "a"}), "both have the name 'a'"),
        (StateDictSource({"w": torch.tensor([1.0, float("nan")])}, check_finite=True), "'w' holds NaN"),
    ],
)
def test_what_cannot_be_published_is_refused(source: StateDictSource | ModuleSource, problem: str) -> None:
    """Unusable weights are an error that names the tensor."""
    with pytest.raises(UnusableWeights, match=problem):
        list(source.tensors())


def test_nan_passes_unless_it_is_looked_for() -> None:
    """Values are not read by default."""
    assert len(list(StateDictSource({"w": torch.tensor([float("nan")])}).tensors())) == 1
