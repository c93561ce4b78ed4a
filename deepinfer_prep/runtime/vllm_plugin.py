"""vLLM loads prepared checkpoints with `--load-format deepinfer_prep`.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in every process that it starts. The
loader feeds vLLM's own models by name, as vLLM's default loader does, and prepares what they hold for the kernels
once vLLM has put its weights into their final form.

Written against the loader interface of vLLM 0.12 to 0.32 (`vllm.model_executor.model_loader`); `scripts/check_vllm.py`
compares what vLLM generates before and after conversion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from deepinfer_prep.errors import ManifestError
from deepinfer_prep.runtime import gemm, mhc
from deepinfer_prep.runtime.load import weights_iterator

LOAD_FORMAT = "deepinfer_prep"
"""What `--load-format` has to say."""


def register() -> None:
    """Let vLLM know the load format; calling it again replaces what was registered."""
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader(LOAD_FORMAT)(_loader_class())


def _loader_class() -> type:
    from vllm.model_executor.model_loader import BaseModelLoader

    class PreparedModelLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM has no types here
        """Loads an output of `deepinfer-prep convert`."""

        def download_model(self, model_config: Any) -> None:
            """Check that the model is a local folder: prepared checkpoints are not fetched.

            Raises:
                ManifestError: it is none.
            """
            _require_folder(model_config.model)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Feed every tensor of the checkpoint, under the source's names, to the model's own loader.

            Raises:
                ManifestError: the folder is not a finished output of deepinfer-prep.
            """
            model.load_weights(weights_iterator(_require_folder(model_config.model)))  # type: ignore[operator]

        def load_model(self, *args: Any, **keywords: Any) -> nn.Module:
            """Build and load a model as vLLM does, then attach what the kernels take.

            Raises:
                RefusedError: the weights in memory hold codes above 240.
            """
            model: nn.Module = super().load_model(*args, **keywords)
            gemm.prepare_model(model)
            mhc.prepare_model(model)
            return model

    return PreparedModelLoader


def _require_folder(model: str) -> Path:
    folder = Path(model)
    if not folder.is_dir():
        raise ManifestError(
            f"{model} is no folder. --load-format {LOAD_FORMAT} loads the output folder of `deepinfer-prep convert`; "
            "give its path as the model."
        )
    return folder
