"""Model.load: what a name means, what is loaded, and that it computes what the oracle computes."""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixtures
import gguf
import numpy as np
import oracle
import pytest
from fixtures import ABSENT, build, write_folder, write_model
from numpy.typing import NDArray

from kvcomm import catalogue, convert
from kvcomm import model as loading
from kvcomm._core import Session, Workspace
from kvcomm.checkpoint import Item
from kvcomm.errors import (
    DeviceError,
    FormatError,
    MismatchError,
    NumericError,
    UnsupportedError,
)
from kvcomm.model import Model
from kvcomm.weights import Tensor

IDS = np.random.default_rng(7).integers(0, fixtures.VOCAB_SIZE, 24)
#: Logits of f32 arithmetic against the oracle's f64.
LOGITS = 1e-5


def logits(model: Model, ids: NDArray[Any] = IDS) -> NDArray[np.float32]:
    sessions = [Session(model.core)]
    out, _ = Workspace(model.core).forward(sessions, [ids], output="logits", outputs="all")
    assert out is not None
    return out


def expected(folder: Path, ids: NDArray[Any] = IDS) -> NDArray[np.float64]:
    return oracle.read_folder(folder).run(ids).logits


def assert_equals_oracle(folder: Path, device: str, **options: Any) -> Model:
    model = Model.load(folder, device=device, **options)
    np.testing.assert_allclose(logits(model), expected(folder), rtol=0, atol=LOGITS)
    return model


# ---- logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("family", fixtures.FAMILIES)
def test_logits_of_every_family(
    tiny: Callable[..., Path], device: str, family: str, dtype: str
) -> None:
    folder = tiny(family, dtype=dtype)
    model = assert_equals_oracle(folder, device)
    assert model.dtype == dtype


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gemma3", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"num_key_value_heads": None}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"head_dim": 24, "hidden_size": 66}),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}),
        ("llama", {"rms_norm_eps": 0.5}),
        ("qwen3", {"rms_norm_eps": 0.5}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True}),
        ("gemma3", {"hidden_size": 72, "dtype": "bf16"}),  # its embedding scale is not exact
        ("gemma3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4}),
    ],
)  # fmt: skip
def test_logits_of_configurations(
    tiny: Callable[..., Path], device: str, family: str, changes: dict[str, Any]
) -> None:
    assert_equals_oracle(tiny(family, **changes), device)


@pytest.mark.parametrize("family", fixtures.FAMILIES)
def test_inverse_frequencies(tiny: Callable[..., Path], device: str, family: str) -> None:
    """CF-032, CF-035, CF-038: every band of every rope kind, layer by layer."""
    model = Model.load(tiny(family), device=device)
    architecture = oracle.architecture_of(fixtures.config_of(family))
    for layer, rope in enumerate(architecture.ropes):
        found = model.core.inv_freq(model.config.core["rope_of_layer"][layer])
        reference = oracle.inverse_frequencies(rope, architecture.head_dim)
        np.testing.assert_allclose(found, reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("position", [10, 9000])
@pytest.mark.parametrize("family", ["llama", "llama3", "yarn", "linear", "gemma3"])
def test_logits_at_far_positions(
    tiny: Callable[..., Path], device: str, family: str, position: int
) -> None:
    folder = tiny(family)
    model = Model.load(folder, device=device)
    session = Session(model.core)
    session.set_position(position)
    out, _ = Workspace(model.core).forward([session], [IDS], output="logits", outputs="all")
    reference = oracle.read_folder(folder).run(IDS, positions=position).logits
    np.testing.assert_allclose(out, reference, rtol=0, atol=LOGITS)


@pytest.mark.parametrize("n", [7, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_prompts_around_and_beyond_the_window(
    tiny: Callable[..., Path], device: str, family: str, n: int
) -> None:
    """KV-089: windows of 8, in one call and in chunks of 5; global layers keep every token."""
    folder = tiny(family)
    model = Model.load(folder, device=device)
    ids = np.random.default_rng(n).integers(0, fixtures.VOCAB_SIZE, n)
    reference = expected(folder, ids)
    np.testing.assert_allclose(logits(model, ids), reference, rtol=0, atol=LOGITS)
    session, workspace = Session(model.core), Workspace(model.core)
    chunks = [
        workspace.forward([session], [ids[begin : begin + 5]], output="logits", outputs="all")[0]
        for begin in range(0, n, 5)
    ]
    np.testing.assert_allclose(np.concatenate(chunks), reference, rtol=0, atol=LOGITS)
    windows = oracle.architecture_of(fixtures.config_of(family)).windows
    for length, window in zip(session.lengths, windows, strict=True):
        assert length == n if window is None else length >= min(n, window)


@pytest.mark.parametrize(("value", "dtype"), [(0.0, "f32"), (0.001, "bf16"), (-1.0, "f32")])
def test_gemma_norms_multiply_by_one_plus_the_weight(
    tmp_path: Path, device: str, value: float, dtype: str
) -> None:
    """NU-120: 1 + 0.001 in bf16 would be 1, so the sum has to be taken in f32."""
    config, weights = build("gemma3")

    def filled(name: str, norm: float) -> Path:
        new = {n: np.full_like(w, norm) if w.ndim == 1 else w for n, w in weights.items()}
        return write_folder(tmp_path / name, config, new, dtype=dtype)

    folder = filled("model", value)
    assert_equals_oracle(folder, device)
    apart = np.abs(expected(folder) - expected(filled("zero", 0.0))).max()
    assert apart > 10 * LOGITS or value == 0.0  # so the comparison can tell
    if value == -1.0:
        assert not logits(Model.load(folder, device=device)).any()


def test_shards_prefixes_and_alignment(tmp_path: Path, device: str) -> None:
    config, weights = build("llama")
    plain = write_folder(tmp_path / "plain", config, weights)
    whole = assert_equals_oracle(plain, device)
    others = {
        "shards": write_folder(tmp_path / "shards", config, weights, shards=3),
        "prefix": write_folder(
            tmp_path / "prefix", config, {f"language_model.{n}": w for n, w in weights.items()}
        ),
        "moved": Path(shutil.copytree(plain, tmp_path / "moved")),
        "odd": write_folder(tmp_path / "odd", config, weights),
    }
    file = others["odd"] / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little") + 3
    file.write_bytes(length.to_bytes(8, "little") + content[8 : 5 + length] + b"   "
                     + content[5 + length :])  # fmt: skip
    for name, folder in others.items():
        with Model.load(folder, device=device) as model:
            np.testing.assert_array_equal(logits(model), logits(whole), err_msg=name)
            assert model.fingerprint == whole.fingerprint, name
            assert model.name == name


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_loading_to_another_dtype_rounds_the_matrices(
    tmp_path: Path, device: str, dtype: str
) -> None:
    config, weights = build("qwen2")
    model = Model.load(write_folder(tmp_path, config, weights), device=device, dtype=dtype)
    rounded = fixtures.rounded(weights, dtype)
    matrices = {name: rounded[name] if w.ndim == 2 else w for name, w in weights.items()}
    reference = oracle.Model(config, matrices).run(IDS).logits
    np.testing.assert_allclose(logits(model), reference, rtol=0, atol=LOGITS)
    assert model.dtype == dtype


def test_widening_is_exact(tiny: Callable[..., Path], device: str) -> None:
    folder = tiny("llama", dtype="bf16")
    assert assert_equals_oracle(folder, device, dtype="f32").dtype == "f32"


def test_mixed_types_are_held_as_stored(tmp_path: Path, device: str) -> None:
    config, weights = build("llama")
    folder = write_folder(tmp_path, config, weights, shards=2)
    halves = sorted(folder.glob("*.safetensors"))
    listed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    second = {n: w for n, w in weights.items() if listed[n] == halves[1].name}
    fixtures.write_safetensors(halves[1], second, "bf16")
    model = Model.load(folder, device=device)
    assert model.dtype == "mixed: bf16, f32"
    mixed = weights | fixtures.rounded(second, "bf16")
    reference = oracle.Model(config, mixed).run(IDS).logits
    np.testing.assert_allclose(logits(model), reference, rtol=0, atol=LOGITS)


def test_nested_gemma3(tmp_path: Path, device: str) -> None:
    text, weights = build("gemma3")
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    extra = {"vision_tower.embeddings.weight": np.ones((4, 4), np.float32)}
    folder = write_folder(
        tmp_path,
        outer | {"text_config": text},
        {f"language_model.{name}": w for name, w in weights.items()} | extra,
        tokenizer=False,
    )
    model = Model.load(folder, device=device)
    reference = oracle.Model(text, weights).run(IDS).logits
    np.testing.assert_allclose(logits(model), reference, rtol=0, atol=LOGITS)
    assert model.unused == ("vision_tower.embeddings.weight",)


def test_padded_vocabulary(tiny: Callable[..., Path], device: str) -> None:  # CF-051
    model = Model.load(tiny("llama"), device=device)
    assert model.tokenizer is not None
    assert (model.vocab_size, model.tokenizer.vocab_size) == (320, 300)
    assert model.tokenizer.decode([310]) == ""


# ---- facts about a model --------------------------------------------------------------------


def test_attributes(tiny: Callable[..., Path], device: str) -> None:
    folder = tiny("qwen3", dtype="bf16")
    model = Model.load(folder, device=device, kv_dtype="f16")
    facts = (model.n_layers, model.n_heads, model.n_kv_heads, model.head_dim, model.vocab_size)
    assert facts == (4, 4, 2, 32, 320)
    assert (model.max_position, model.device, model.kv_dtype) == (2048, device, "f16")
    assert model.stop_ids == (fixtures.EOS, fixtures.TURN_END)
    assert model.path == folder
    assert "qwen3, 4 layers, 4/2 heads of 32, vocabulary 320, bf16" in repr(model)
    elements = sum(w.size for w in build("qwen3")[1].values())
    assert model.memory["files"] == 2 * elements
    assert model.memory["kv_per_token"] == 4 * 2 * 2 * 32 * 2
    assert model.memory["weights"] == model.nbytes == model.core.nbytes


def test_one_copy_of_a_tied_table(tiny: Callable[..., Path], device: str) -> None:  # ST-017
    tied = Model.load(tiny("llama", tie_word_embeddings=True), device=device)
    untied = Model.load(tiny("llama"), device=device)
    assert untied.nbytes - tied.nbytes >= 320 * 64 * 4


def test_stop_ids(tmp_path: Path, device: str) -> None:  # CF-045
    for number, (stated, ids) in enumerate(
        [([301, 302, 303], (301, 302, 303)), (301, (301,)), ([], ()), (None, ())]
    ):
        folder = write_model(tmp_path / str(number), "llama", eos_token_id=stated)
        assert Model.load(folder, device=device).stop_ids == ids
    silent = write_model(tmp_path / "silent", "llama", eos_token_id=ABSENT)
    (silent / "generation_config.json").unlink()
    assert Model.load(silent, device=device).stop_ids == (fixtures.TURN_END,)  # the tokenizer's
    bare = write_model(tmp_path / "bare", "llama", eos_token_id=ABSENT, tokenizer=False)
    assert Model.load(bare, device=device).stop_ids == ()


def test_without_a_tokenizer(tiny: Callable[..., Path], device: str) -> None:
    model = Model.load(tiny("llama", tokenizer=False), device=device)
    assert model.tokenizer is None
    assert logits(model).shape == (24, 320)


def test_tokenizer_that_does_not_fit(tmp_path: Path, device: str) -> None:
    folder = write_model(tmp_path, "llama", vocab_size=299)
    with pytest.raises(MismatchError, match=r"tokenizer has 300 ids, the model 299"):
        Model.load(folder, device=device)


def test_pointer_in_place_of_a_tokenizer(tmp_path: Path, device: str) -> None:  # ST-004
    folder = write_model(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(FormatError, match=r"tokenizer\.json.*[Gg]it-(lfs|LFS)"):
        Model.load(folder, device=device)


def test_close(tiny: Callable[..., Path], device: str) -> None:
    with Model.load(tiny("llama"), device=device) as model:
        session = Session(model.core)
        workspace = Workspace(model.core)
    with pytest.raises(ValueError, match="is closed"):
        _ = model.core
    assert "closed" in repr(model)
    model.close()
    gc.collect()
    out, _ = workspace.forward([session], [IDS], output="argmax")  # they keep what they need
    assert out is not None
    assert out.shape == (1,)


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight", "model.norm.weight"],
)
def test_weights_that_are_not_finite(tmp_path: Path, device: str, name: str, value: float) -> None:
    config, weights = build("llama")
    weights[name].reshape(-1)[-1] = value
    folder = write_folder(tmp_path, config, weights)
    with pytest.raises(NumericError, match=rf"model\.safetensors: {name}: "):
        Model.load(folder, device=device)


def test_faults_of_the_folder_come_through(tmp_path: Path, device: str) -> None:
    folder = write_model(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    for changes, error in (
        ({"model_type": "mixtral"}, UnsupportedError),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, UnsupportedError),
        ({"num_key_value_heads": 3}, FormatError),
        ({"num_key_value_heads": 4}, MismatchError),
        ({"num_hidden_layers": 5}, FormatError),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(error):
            Model.load(folder, device=device)


def test_configuration_is_judged_before_weights(tmp_path: Path, device: str) -> None:
    folder = write_model(tmp_path, "llama", rope_scaling={"rope_type": "longrope", "factor": 2})
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(UnsupportedError, match="longrope"):
        Model.load(folder, device=device)


def test_arguments(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    with pytest.raises(ValueError, match="dtype is 'f64', expected one of auto, f32, f16, bf16"):
        Model.load(folder, dtype="f64")
    with pytest.raises(ValueError, match="kv_dtype is 'auto'"):
        Model.load(folder, kv_dtype="auto")
    with pytest.raises((DeviceError, ValueError), match="abacus"):
        Model.load(folder, device="abacus")
    with pytest.raises(TypeError, match="path_or_name is int"):
        Model.load(7)  # type: ignore[arg-type]
    for bad in ("", "a\0b"):
        with pytest.raises(ValueError, match="expected a path or a name"):
            Model.load(bad)


# ---- names ----------------------------------------------------------------------------------


def test_kinds_of_paths(tiny: Callable[..., Path], device: str) -> None:
    folder = tiny("llama")
    prints = {
        Model.load(kind(folder), device=device).fingerprint for kind in (str, Path, os.fsencode)
    }
    assert len(prints) == 1


def test_unknown_names(tmp_path: Path) -> None:
    for name in (tmp_path / "absent", "no-such-model"):
        with pytest.raises(FileNotFoundError, match=r"no such folder or file.*smollm2-135m"):
            Model.load(name)
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    with pytest.raises(UnsupportedError, match=r"neither a model folder nor a GGUF file"):
        Model.load(other)
    other.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(FormatError, match=r"git-lfs pointer"):
        Model.load(other)


def test_catalogue_name(
    tiny: Callable[..., Path], device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tiny("llama")
    asked: list[str] = []

    def prepared(name: str, *_: Any) -> Path:
        asked.append(name)
        return folder

    monkeypatch.setattr(catalogue, "prepared", prepared)
    monkeypatch.chdir(tmp_path)
    model = Model.load("smollm2-135m", device=device)
    assert (model.name, asked) == ("smollm2-135m", ["smollm2-135m"])
    shutil.copytree(folder, "smollm2-135m")  # a folder of that name goes first
    assert Model.load("smollm2-135m", device=device).path == Path("smollm2-135m")
    assert len(asked) == 1


def _write_gguf(path: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    """The weights as a GGUF file of the llama kind: rotary halves of q and k interleaved."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    vocab = fixtures.tokenizer_json()["model"]["vocab"]
    added = [text for text, _ in fixtures.ADDED_TOKENS.values()]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*vocab, *added])
    writer.add_token_types([1] * len(vocab) + [3] * len(added))
    writer.add_token_merges([" ".join(pair) for pair in fixtures.MERGES])
    writer.add_eos_token_id(fixtures.EOS)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "model.layers": "blk", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
        "post_attention_layernorm": "ffn_norm", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, values in weights.items():
        if "q_proj" in name or "k_proj" in name:
            heads = len(values) // config["head_dim"]
            halves = values.reshape(heads, 2, config["head_dim"] // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = build("llama", vocab_size=fixtures.TOKENIZER_SIZE)
    file = tmp_path / "tiny.gguf"
    _write_gguf(file, config, weights)
    model = Model.load(file, device=device, cache=tmp_path / "cache")
    ids = IDS % fixtures.TOKENIZER_SIZE
    reference = oracle.Model(config, weights).run(ids).logits
    np.testing.assert_allclose(logits(model, ids), reference, rtol=0, atol=LOGITS)
    assert (model.name, model.stop_ids) == ("tiny", (fixtures.EOS,))
    monkeypatch.setattr(convert, "convert", None)  # it is not needed a second time
    again = Model.load(os.fsencode(file), device=device, cache=os.fsencode(tmp_path / "cache"))
    assert again.fingerprint == model.fingerprint


def test_hub_id(tiny: Callable[..., Path], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(tiny("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert Model.load("some-org/tiny.model", device=device).name == "some-org/tiny.model"
    ((repo_id, options),) = calls
    assert repo_id == "some-org/tiny.model"
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nmore text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = r"^some-org/model: no such folder or file, and not to be had from the hub: no conn"
    with pytest.raises(OSError, match=message) as caught:
        Model.load("some-org/model")
    assert "\n" not in str(caught.value)


# ---- memory: ST-030 -------------------------------------------------------------------------

_PEAK = """
import sys
from kvcomm.model import Model
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
before = peak()
model = Model.load(sys.argv[1], dtype=sys.argv[2])
print(peak() - before, model.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(("stored", "held"), [("bf16", "bf16"), ("bf16", "f32"), ("f32", "bf16")])
def test_peak_memory(tmp_path: Path, stored: str, held: str) -> None:
    """Loading takes the model's own memory and a tenth, whatever the file holds."""
    config = fixtures.config_of(
        "llama", hidden_size=1024, intermediate_size=8192, num_hidden_layers=2, head_dim=256
    )
    shapes = fixtures.shapes_of(config)
    weights = {name: np.broadcast_to(np.float32(0.01), shape) for name, shape in shapes.items()}
    write_folder(tmp_path, config, weights, dtype=stored, tokenizer=False)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _PEAK, str(tmp_path), held]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    peak, n_bytes = map(int, done.stdout.split())
    elements = sum(int(np.prod(shape)) for shape in shapes.values())
    assert n_bytes >= {"bf16": 2, "f32": 4}[held] * elements > 100_000_000
    assert peak < 1.1 * n_bytes


# ---- batches: what the core reads in one call ------------------------------------------------


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (100, ["abc", "d"]),  # a call never spans two files
        (10, ["ab", "c", "d"]),
        (9, ["a", "b", "c", "d"]),
        (1, ["a", "b", "c", "d"]),  # a tensor is never split
    ],
)
def test_batches(room: int, expected: list[str]) -> None:
    sizes = {"a": (4, "x"), "b": (6, "x"), "c": (7, "x"), "d": (1, "y")}
    items = [
        Item("q", 0, Tensor(name, "F32", (n,), Path(file), 0, n))
        for name, (n, file) in sizes.items()
    ]
    batches = [[item.tensor.name for item in batch] for batch in loading._batches(items, room)]
    assert ["".join(batch) for batch in batches] == expected


def test_small_batches_and_a_bar(
    tiny: Callable[..., Path],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny("llama", shards=3)
    whole = logits(Model.load(folder, device=device))
    monkeypatch.setattr(loading, "_BAR_BATCH", 1)
    model = Model.load(folder, device=device, progress=True)
    np.testing.assert_array_equal(logits(model), whole)
    assert "100%" in capsys.readouterr().err
