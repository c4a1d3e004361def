"""What a checkpoint will take, told from its headers, against what loading and talking really take."""

import gc
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_voicechat.cli import published
from mlx_voicechat.frame import Slab, leaves
from mlx_voicechat.gauges import memory, plans
from mlx_voicechat.gauges.bench import networks_resident
from mlx_voicechat.gauges.memory import Machine, announce
from mlx_voicechat.networks.cache import KvCache
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.voicechat import load
from mlx_voicechat.weights import assets, synthetic
from mlx_voicechat.weights.config_file import parse_config, read_config
from mlx_voicechat.weights.shards import Stored, verify
from tests.support.checkpoints import GOLDEN

FRAMES = 20
GB = 10**9


def quiet(_: str) -> None:
    pass


@dataclass
class Taken:
    announced: memory.Announced
    loaded: int
    total: int
    resident: dict[str, int]


def taken(folder: Path, speech_weights: str | None = None, frames: int = FRAMES) -> Taken:
    """Load a checkpoint and talk with it: what was announced, and what MLX then held."""
    config, stored = read_config(folder), verify(folder)
    plan = plans.choose(config, stored, LoadOptions(speech_weights=speech_weights)).requantise
    gc.collect()
    before = mx.get_active_memory()
    model = load(folder, quiet, compile=False, speech_weights=speech_weights)  # type: ignore[arg-type]
    loaded = mx.get_active_memory() - before
    session = model.session()
    for _ in range(frames):
        session.push(np.zeros(config.frame_samples_in, np.float32))
    gc.collect()
    return Taken(
        announce(config, stored, frames, requantise=plan),
        loaded,
        mx.get_active_memory() - before,
        networks_resident(model, loaded),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint, all sizes distinct."""
    return synthetic.write_random("random", tmp_path_factory.mktemp("memory") / "made")


@pytest.fixture(scope="module")
def published_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in the form of the published 4-bit one: its LLM computes in float32."""
    raw = json.loads((GOLDEN / "tiny-f32" / "config.json").read_text(encoding="utf-8"))
    return synthetic.write(raw, tmp_path_factory.mktemp("memory") / "published", bits=4)


@pytest.mark.parametrize("name", ["tiny", "tiny-f32", "tiny-4bit", "made", "published form"])
def test_what_is_announced_is_taken(name: str, made: Path, published_form: Path) -> None:
    folder = {"tiny": assets.TINY, "made": made, "published form": published_form}.get(name, GOLDEN / name)
    got = taken(folder)
    assert got.announced.loaded == pytest.approx(got.loaded, rel=0.05)
    assert got.announced.total == pytest.approx(got.total, rel=0.05)
    for network in ("perception", "rnnt", "language", "codec"):
        assert got.announced.weights[network] == got.resident[network]
    assert got.announced.weights["tts"] == pytest.approx(got.resident["tts"], rel=0.01)  # voices are no parameters
    assert got.announced.text_table == got.resident["text_table"]
    assert sum(got.resident.values()) == got.loaded


def test_speech_weights_in_8_bits_are_announced() -> None:
    got = taken(assets.TINY, "q8", frames=1)
    assert got.announced.loaded == pytest.approx(got.loaded, rel=0.05)
    whole = announce(read_config(assets.TINY), verify(assets.TINY), 1)
    assert got.announced.weights["tts"] < whole.weights["tts"]
    assert got.announced.weights["tts"] == pytest.approx(got.resident["tts"], rel=0.01)
    assert got.announced.weights["language"] == whole.weights["language"]


def test_a_longer_conversation_takes_more_until_the_windows_are_full() -> None:
    config, stored = read_config(GOLDEN / "tiny-f32"), verify(GOLDEN / "tiny-f32")
    speech = [announce(config, stored, frames).session["tts"] for frames in (10, 400, 800)]
    assert speech == sorted(set(speech))
    prompted = announce(config, stored, 300, prompt_tokens=300)
    assert prompted.session["tts"] > announce(config, stored, 300).session["tts"]
    assert prompted.opening > announce(config, stored, 300).opening


@pytest.mark.parametrize("window", [None, 48, 300])
@pytest.mark.parametrize("phase", [0, 3, 300])
def test_room_of_a_cache(window: int | None, phase: int) -> None:
    cache = KvCache(window, phase)
    position = mx.zeros((1, 1, 1, 1))
    for positions in range(1, 600):
        cache.update(position, position)
        assert cache.joint is not None
        assert cache.room(positions) == cache.joint.shape[2]
    assert KvCache(window, phase).room(0) == 0


@pytest.mark.parametrize(
    ("name", "tensor", "size"),
    [
        ("stt_model.llm.layers.0.mixer.in_proj.weight", Stored("f", (8, 4), "BF16"), 64),
        ("stt_model.llm.layers.0.mixer.in_proj.weight", Stored("f", (8, 4), "U32"), 128),
        ("stt_model.llm.layers.0.mixer.A_log", Stored("f", (8,), "BF16"), 32),
        ("stt_model.perception.proj.weight", Stored("f", (8, 4), "BF16"), 128),
        ("tts_model.codec_silence_tokens", Stored("f", (31,), "I64"), 124),
        ("tts_model.audio_prompt_latents.Aria", Stored("f", (1, 2, 3), "BF16"), 24),
        ("stt_model.rnnt_decoder.prediction.dec_rnn.lstm.bias_ih_l0", Stored("f", (4,), "F32"), 16),
        ("stt_model.rnnt_decoder.prediction.dec_rnn.lstm.bias_hh_l0", Stored("f", (4,), "F32"), 0),
        ("tts_model.audio_codec.encoder.layers.0.weight", Stored("f", (8, 4, 1), "F32"), 0),
        ("tts_model.tts_model.audio_prompt_projection_W", Stored("f", (8, 8), "F32"), 0),
    ],
)
def test_bytes_held(name: str, tensor: Stored, size: int) -> None:
    assert memory.resident(name, tensor) == size


def released(bits: int | None) -> tuple[memory.ModelConfig, dict[str, Stored]]:
    """Config and headers of the published checkpoint with an LLM of so many bits."""
    config = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
    return config, published.headers(config, bits)


def test_the_released_model() -> None:
    config, stored = released(4)
    announced = announce(config, stored, 7500)
    assert announced.text_table == 131072 * 1152 * 4
    assert announced.session["tts"] == pytest.approx(3.9 * GB, rel=0.01)  # two rows, 28 layers, 7,500 positions
    assert announced.loaded == pytest.approx(12.66 * GB, rel=0.001)


@pytest.mark.parametrize(
    ("bits", "available", "words"),
    [
        (4, 30, None),
        (4, 12, "no smaller checkpoint"),
        (8, 15, "VoiceChat-11B-4bit needs 13.7 GB and would fit"),
        (None, 20, "VoiceChat-11B-8bit needs 18.4 GB and would fit"),
        (None, 14, "VoiceChat-11B-4bit needs 13.7 GB and would fit"),
        (None, 8, "Even mlx-community/NemotronLabs-VoiceChat-11B-4bit needs 13.7 GB"),
    ],
)
def test_too_little_memory_names_what_would_fit(bits: int | None, available: int, words: str | None) -> None:
    warning = memory.shortfall(*released(bits), Machine(32 * GB, available * GB))
    assert (warning is None) == (words is None)
    if words:
        assert warning is not None
        assert words in warning
        assert f"{available}.0 GB of 32.0 GB are available" in warning


def test_several_conversations_are_warned_of_together() -> None:
    checkpoint, one = released(4), announce(*released(4), 750)
    have = Machine(32 * GB, one.total + GB // 10)
    assert memory.shortfall(*checkpoint, have) is None
    warning = memory.shortfall(*checkpoint, have, sessions=5)
    assert warning is not None
    assert "for 5 conversations" in warning


def test_conversations_that_step_together_leave_rows_free() -> None:
    config = read_config(assets.TINY)
    found = announce(config, verify(assets.TINY), 100)
    session = sum(found.session.values())
    totals = [found.with_sessions(count) - found.with_sessions(1) for count in (2, 3, 5, 8, 9)]
    assert totals == [count * session + free * found.row for count, free in ((1, 0), (2, 1), (4, 3), (7, 0), (8, 0))]
    model = load("tiny", compile=False)
    slab = Slab.of([model.session().state for _ in range(3)])
    rows = sum(array.nbytes for array in leaves(slab.state.fixed))
    assert rows <= 4 * found.row <= 1.5 * rows  # announced with the buffers that a step's views are cut from


@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_smaller_checkpoint_is_said_to_need_is_what_it_needs(bits: int) -> None:
    config, wide = released(None)
    needed = [announce(config, stored, 750).total for stored in (wide, released(bits)[1])]
    assert needed[0] - memory._saved(config, wide, bits, 750) == pytest.approx(needed[1], rel=1e-3)


def test_loading_warns_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine", lambda: Machine(10**9, 10**6))
    said: list[str] = []
    assert load("tiny", said.append, compile=False).name == "tiny"
    assert [text for text in said if "needs about" in text and "available" in text]


def measured(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=total, available=available))


def test_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert 0 < memory.machine().available <= memory.machine().total
    measured(monkeypatch, 9000 * 1024, 8000 * 1024)
    assert memory.machine().available == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.machine().available == 8000 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory.machine() == Machine(5000, 4000)


def test_memory_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    measured(monkeypatch, 64 * GB, 50 * GB)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 48 * GB})
    assert memory.machine() == Machine(64 * GB, 48 * GB)
    measured(monkeypatch, 64 * GB, 20 * GB)
    assert memory.machine() == Machine(64 * GB, 20 * GB)


def test_names_of_no_network_are_left_to_the_loading() -> None:
    config, stored = read_config(GOLDEN / "tiny-f32"), verify(GOLDEN / "tiny-f32")
    odd = stored | {"odd.weight": Stored("f", (3,), "F32")}
    assert announce(config, odd, 1) == announce(config, stored, 1)
    assert math.isfinite(announce(config, {}, 1).total)
