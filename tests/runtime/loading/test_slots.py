"""The places of a model: shared, renamed and computed tensors."""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_prep.runtime.loading.slots import slots_of
from tests.runtime.models import Holder


class Equal(Holder):
    """Modules of this class are equal to one another, as a dataclass's are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 0


def test_modules_that_compare_equal_are_owners_each() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.a, model.b = Equal(w=torch.zeros(2)), Equal()
    model.b.w = model.a.w
    slots = slots_of(model)
    slot = slots.by_name["b.w"]
    assert slot is slots.by_name["a.w"]
    slot.install(torch.ones(2))
    assert model.a.w is model.b.w
    assert slots.on_meta() == ()


def test_a_module_under_two_paths_owns_its_tensors_once() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.x = model.y = Holder(p=torch.zeros(2))
        model.x.register_buffer("inv", torch.zeros(2), persistent=False)
    slots = slots_of(model)
    assert [[(owner.module, owner.attribute) for owner in one] for one in slots.by_name["y.p"].owners] == [
        [(model.x, "p")]
    ]
    assert slots.on_meta() == ("x.p", "x.inv")


def test_a_parameter_in_the_place_of_a_computed_buffer_is_filled() -> None:
    model = nn.Module()
    model.register_buffer("x", torch.zeros(2), persistent=False)
    model._buffers.pop("x")
    model.register_parameter("x", nn.Parameter(torch.zeros(2)))
    slots = slots_of(model)
    assert list(slots.by_name) == ["x"] == list(model.state_dict())
    assert slots.computed == {}
