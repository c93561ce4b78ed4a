"""What a host says about how a checkpoint goes into its model: names, parts, exceptions, forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from deepinfer_prep.runtime.loading.assembly import Target
from deepinfer_prep.runtime.loading.scale_form import AS_STORED, ScaleForm
from deepinfer_prep.runtime.loading.slices import WHOLE, Slice

Wanted = str | Target | None
Rename = Callable[[str], Wanted | Sequence[str | Target]]
Slices = Callable[[str], Slice | None]
Scales = Callable[[str], ScaleForm | None]
Names = str | Iterable[str]
"""Names in full, or patterns in which `*` stands for any text."""


@dataclass(frozen=True, slots=True)
class LoadRules:
    """The choices of one `load_weights` call; they are explained there."""

    rename: Rename | None = None
    slices: Slices | None = None
    scales: ScaleForm | Scales | None = None
    strict: bool = True
    allow_missing: Names = ()
    allow_unexpected: Names = ()
    pad_rows: Names = ()
    cast: Names = ()

    def targets(self, tensor: str) -> tuple[Target, ...]:
        """Where a tensor goes; empty where it is not wanted.

        Raises:
            TypeError: `rename` returned something else.
        """
        if self.rename is None:
            return (Target(tensor),)
        wanted = self.rename(tensor)
        if wanted is None:
            return ()
        several: Sequence[object] = wanted if isinstance(wanted, list | tuple) else [wanted]
        targets = tuple(Target(one) if isinstance(one, str) else one for one in several)
        if any(not isinstance(target, Target) for target in targets):
            raise TypeError(
                f"rename({tensor!r}) returned {wanted!r}. Expected the name of a parameter, a Target, a list of these "
                "for a tensor that goes to several places, or None for one that is not wanted."
            )
        return tuple(target for target in targets if isinstance(target, Target))

    def part(self, tensor: str) -> Slice:
        """The part of a tensor that is loaded.

        Raises:
            TypeError: `slices` returned something else.
        """
        wanted = None if self.slices is None else self.slices(tensor)
        if wanted is not None and not isinstance(wanted, Slice):
            raise TypeError(
                f"slices({tensor!r}) returned {wanted!r}. Expected a Slice, such as Slice(rows=(0, 128)), or None for "
                "the whole tensor."
            )
        return wanted or WHOLE

    def scale_form(self, parameter: str) -> ScaleForm:
        """The form of the scale of a parameter's weight.

        Raises:
            TypeError: `scales` returned something else.
        """
        wanted = self.scales(parameter) if callable(self.scales) else self.scales
        if wanted is not None and not isinstance(wanted, ScaleForm):
            raise TypeError(
                f"scales({parameter!r}) returned {wanted!r}. Expected a ScaleForm, such as "
                "ScaleForm(torch.float32), or None for the scale as it is stored."
            )
        return wanted or AS_STORED


def is_named(name: str, names: Names) -> bool:
    """Whether a name is one of `names` or fits one of its patterns."""
    patterns = (names,) if isinstance(names, str) else names
    return any(fnmatchcase(name, pattern) for pattern in patterns)
