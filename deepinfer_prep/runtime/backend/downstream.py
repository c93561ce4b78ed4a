"""The compiler that legalized graphs go to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from deepinfer_prep.errors import BackendOptionError, NeuronUnavailableError
from deepinfer_prep.runtime.backend.debug import DUMP_DIR

BASE_BACKEND = "DEEPINFER_NEURON_BASE_BACKEND"
_OWN_OPTIONS = ("base_backend", "dump_dir")


@dataclass(frozen=True)
class Settings:
    """What a call of torch.compile asks for.

    base_backend: a name or a callable; None for torch-neuronx. options, mode: handed on as they came.
    """

    base_backend: str | Callable[..., Any] | None
    dump_dir: str | None
    options: dict[str, Any] | None
    mode: str | None


def read_settings(options: Mapping[str, Any] | None, mode: str | None) -> Settings:
    """Our own options, or the environment variables behind them, apart from those for the downstream."""
    given = dict(options or {})
    own = {name: given.pop(name, None) for name in _OWN_OPTIONS}
    base = own["base_backend"] or os.environ.get(BASE_BACKEND) or None
    if base is not None and not isinstance(base, str) and not callable(base):
        raise BackendOptionError(
            f'options["base_backend"] must be the name of a torch.compile backend or a callable, found {base!r}.'
        )
    rest = None if options is None else given
    return Settings(base, own["dump_dir"] or os.environ.get(DUMP_DIR) or None, rest, mode)


def compile_downstream(settings: Settings, module: Any, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph with torch-neuronx, or with the backend that the settings name."""
    if settings.base_backend == "inductor":
        return _compile_with_inductor(settings, module, example_inputs)
    base = settings.base_backend
    compiler: Callable[..., Any] = _neuron_backend() if base is None else _lookup(base)
    keywords: dict[str, Any] = {}
    if settings.options or (base is None and settings.options is not None):
        keywords["options"] = settings.options
    if settings.mode is not None:
        keywords["mode"] = settings.mode
    compiled: Callable[..., Any] = compiler(module, example_inputs, **keywords)
    return compiled


def _compile_with_inductor(settings: Settings, module: Any, example_inputs: list[Any]) -> Callable[..., Any]:
    """inductor takes its options as configuration patches."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(settings.mode) if settings.mode else {}), **(settings.options or {})}
    compiled: Any = compile_fx(module, example_inputs, config_patches=patches or None)
    return cast(Callable[..., Any], compiled)


def _lookup(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    if callable(backend):
        return backend
    if backend == "deepinfer_neuron" or backend not in list_backends(exclude_tags=()):
        known = ", ".join(name for name in list_backends(exclude_tags=()) if name != "deepinfer_neuron")
        raise BackendOptionError(
            f"base_backend is {backend!r}, which is not a torch.compile backend that deepinfer_neuron can stand "
            f"before. Known: {known}."
        )
    found: Callable[..., Any] = lookup_backend(backend)
    return found


def _neuron_backend() -> Callable[..., Any]:
    """torch-neuronx's backend.

    :raises NeuronUnavailableError: if it is absent, or the placeholder that raises on import.
    """
    try:
        from torch_neuronx.neuron_dynamo_backend.backend import neuron_backend
    except Exception as error:
        raise NeuronUnavailableError(
            "The deepinfer_neuron backend compiles with torch-neuronx, which could not be imported "
            f"({type(error).__name__}: {error}). Install torch-neuronx and neuronx-cc from the AWS Neuron package "
            "index (the packages of those names elsewhere are empty placeholders). To run on this host "
            'instead, pass options={"base_backend": "aot_eager"} to torch.compile or set '
            f"{BASE_BACKEND}=aot_eager."
        ) from error
    backend: Callable[..., Any] = neuron_backend
    return backend
