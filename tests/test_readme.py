"""The README's Python example, run word by word as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_python_example_runs(real_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.DOTALL | re.M)
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    packet = names["packet"]
    assert len(names["layers"]) == real_model.n_layers // 2
    assert packet.layers == tuple(names["layers"])
    per_token = 2 * real_model.n_kv_heads * real_model.head_dim * 4  # K and V in f32
    assert packet.nbytes == len(packet.layers) * packet.context_len * per_token
    printed = capsys.readouterr().out
    assert printed.startswith(f"{names['answer'].text} {packet.nbytes} ")
    # Having read that Mr. Oakes owns it makes his name likelier than the question alone does.
    receiver = names["receiver"]
    with_packet = receiver.score(names["question"], "Mr. Oakes", packet).nll
    assert with_packet < receiver.score(names["question"], "Mr. Oakes").nll
