"""Models for the tests: tiny ones made on the spot, and the bundled one, fetched once into the cache."""

from __future__ import annotations

import pytest
import torch

from octavo.models.weights import FetchError, ModelSource, resolve_model


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    try:
        return resolve_model("smollm2-135m")
    except FetchError as error:
        pytest.skip(f"smollm2-135m could not be fetched: {error}")


@pytest.fixture(scope="session")
def hf_smollm2(smollm2: ModelSource):
    """The same file through transformers' own GGUF reader and Llama: the independent oracle."""
    from transformers import AutoModelForCausalLM

    path = smollm2.path
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
