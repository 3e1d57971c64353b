"""Fixtures that every test may use: the device, the shared folder, tiny models, one real model.

Owns no test. The suite runs unchanged on another backend with KVCOMM_TEST_DEVICE=guard (or cuda).
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
if str(TESTS) not in sys.path:  # other import modes of pytest do not add it
    sys.path.insert(0, str(TESTS))

# A shell that starts the suite in the background leaves SIGINT ignored, here and in children.
signal.signal(signal.SIGINT, signal.default_int_handler)


DEVICE = os.environ.get("KVCOMM_TEST_DEVICE", "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device only tests that ask for it run: the others would do the same again."""
    if DEVICE == "cpu":
        return
    left_out = [item for item in items if "device" not in item.fixturenames]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if "device" in item.fixturenames]


@pytest.fixture(scope="session")
def device() -> str:
    """The device that the suite runs on."""
    return DEVICE


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recordings and data beside the repository."""
    path = TESTS.parent.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the folder ../shared (recordings and data), which is not here")
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(family, **options of fixtures.write_model) -> folder, written once per session.

    The folder is shared: a test that edits files writes its own with fixtures.write_model.
    """
    import fixtures

    root = tmp_path_factory.mktemp("tiny")
    folders: dict[str, Path] = {}

    def folder(family: str, **options: Any) -> Path:
        key = repr((family, sorted(options.items(), key=lambda item: item[0])))
        if key not in folders:
            path = root / f"{family}-{len(folders)}"
            folders[key] = fixtures.write_model(path, family, **options)
        return folders[key]

    return folder


@pytest.fixture(scope="session")
def real_model(device: str) -> Any:
    """SmolLM2-135M-Instruct with f32 weights, loaded once; fetched when the cache has none."""
    import kvcomm

    try:
        kvcomm.catalogue.prepared("smollm2-135m")
    except OSError as error:
        pytest.skip(f"smollm2-135m is not in the cache and cannot be fetched: {error}")
    return kvcomm.Model.load("smollm2-135m", device=device, dtype="f32")


@pytest.fixture(scope="module")
def load(tiny: Callable[..., Path], device: str) -> Callable[..., Any]:
    """load(family, **changes) -> (folder, model) of a tiny model, each once."""
    import kvcomm

    models: dict[Path, Any] = {}

    def get(family: str, **changes: Any) -> tuple[Path, Any]:
        folder = tiny(family, **changes)
        if folder not in models:
            models[folder] = kvcomm.Model.load(folder, device=device)
        return folder, models[folder]

    return get
