"""Parity with the recordings in ../shared/reference; ids fed as recorded, weights f32.

The checks are those of benchmarks/parity.py, on a part of the records that keeps the suite short.
With KVCOMM_TEST_FULL=1 all of them run, on both models.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

import kvcomm

FULL = os.environ.get("KVCOMM_TEST_FULL") == "1"
needs_full = pytest.mark.skipif(not FULL, reason="takes long; set KVCOMM_TEST_FULL=1")


def _load_script():
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "parity.py"
    spec = importlib.util.spec_from_file_location("parity", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module
    sys.path.insert(0, str(path.parent))  # the script imports its neighbours
    spec.loader.exec_module(module)
    return module


parity = _load_script()


def assert_equal(outcomes, *, at_least):
    """Everything equal but near-ties, and as many comparisons as there should be."""
    outcomes = list(outcomes)
    wrong = [o for o in outcomes if not o.equal and not o.near_tie]
    assert not wrong, "\n".join(f"{o.group} {o.case}: {o.error:.2e} {o.note}" for o in wrong)
    assert len(outcomes) >= at_least


@pytest.fixture(scope="module")
def recorded(shared):
    """recorded(name) -> the parsed file."""
    return lambda name: json.loads((shared / "reference" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def pair(real_model):
    return parity.Pair(real_model, real_model)


@pytest.mark.parametrize(
    ("task", "limit"), [("hotpotqa", 2), ("countries", 3), ("tipsheets", 2), ("musique", 1)]
)
def test_published_answers(recorded, pair, task, limit):
    """Greedy ids and first logits of baseline, skyline and kvcomm at every ratio."""
    outcomes = parity.published_task(pair, recorded("oracle_smollm2"), task, limit)
    assert_equal(outcomes, at_least=6 * 2 * limit)


@pytest.mark.parametrize("task", ["hotpotqa", "countries", "tipsheets", "musique"])
def test_published_calibrations(recorded, pair, task):
    """Masses of the published softmax and of the causal one, rankings, chosen layers."""
    data = recorded("oracle_smollm2")
    calibration = data["calibration"][task]
    item = data["items"][task]["items"][calibration["item"]]
    sample = (item["sender"]["ids"], item["receiver"]["ids"])
    outcomes = parity.published_calibration(pair, task, calibration, sample)
    assert_equal(outcomes, at_least=1 + 2 + 2 + 6)


def test_published_variants(recorded, pair):
    """shift_back, contiguous layers, two senders, random layers."""
    outcomes = parity.published_variants(pair, recorded("oracle_smollm2"))
    assert_equal(outcomes, at_least=2 * 2 + 2 * 2 + 3 + 2 * 6 + 3)


def test_paper_likelihoods(recorded, pair):
    outcomes = parity.paper_records(pair, recorded("paper_smollm2"), limit=3)
    assert_equal(outcomes, at_least=1 + 6 + 3 * 13)


@needs_full
@pytest.mark.parametrize("name", parity.MODELS)
def test_everything(shared, device, name):
    model = kvcomm.Model.load(name, device=device, dtype="f32")
    outcomes = parity.everything(model, shared / "reference", parity.MODELS[name])
    assert_equal(outcomes, at_least=550)
