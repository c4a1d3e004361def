"""Settings of a session: any JSON is taken or refused in words, and what was said stays said."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_voicechat.server.duplex_config import DuplexConfig
from mlx_voicechat.server.openai_config import SERVER_VAD, SessionConfig
from mlx_voicechat.server.openai_events import Wrong
from mlx_voicechat.server.wire_audio import WireFormat

FORM = WireFormat("audio/pcm", 24_000)
GA = SessionConfig("tiny", FORM, FORM)
DUPLEX = DuplexConfig("tiny", FORM, FORM)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = [
    "instructions",
    "tools",
    "tool_choice",
    "audio",
    "output_modalities",
    "modalities",
    "max_output_tokens",
    "turn_detection",
    "voice",
    "speed",
    "input_audio_format",
    "output_audio_format",
    "input_audio_transcription",
    "temperature",
    "tracing",
    "model",
    "overlap_policy",
    "extra_body",
    "sample_rate_hz",
    "playback_commit_policy",
    "idle_timeout_s",
    "overlap_silence_rms",
]
AUDIO = st.fixed_dictionaries(
    {},
    optional={
        side: st.dictionaries(st.sampled_from(["format", "turn_detection", "voice"]), JSON)
        for side in ("input", "output")
    },
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.fixed_dictionaries({}, optional={key: AUDIO | JSON if key == "audio" else JSON for key in KEYS}))
def test_any_update(session: dict[str, Any]) -> None:
    refused: set[str] = set()
    for config in (GA, DUPLEX):
        try:
            after = config.updated(session)
        except Wrong as wrong:
            refused.add(wrong.code)
            continue
        assert after.updated({}) == after
        assert after.as_json("sess_1")["id"] == "sess_1"
        assert after.as_beta_json("sess_1")["object"] == "realtime.session"
    assert refused <= {"invalid_event", "invalid_tools", "unsupported_audio_format", "unsupported_turn_detection"}


def test_what_is_not_named_stays_and_null_clears() -> None:
    one = GA.updated({"instructions": "One.", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}})
    two = one.updated({"audio": {"output": {"voice": "marin"}}, "temperature": 0.7, "prompt": None})
    assert (two.instructions, two.voice, two.echoed) == ("One.", "marin", {"temperature": 0.7, "prompt": None})
    assert two.turn_detection == {**SERVER_VAD, "create_response": True, "interrupt_response": True}
    three = two.updated({"instructions": None, "audio": {"input": {"turn_detection": None}}, "temperature": None})
    assert (three.instructions, three.turn_detection, three.echoed["temperature"]) == (None, None, None)


@pytest.mark.parametrize(
    ("turn", "owner", "detects", "interrupts"),
    [
        (None, "application", False, False),
        ({"type": "none"}, "application", False, False),
        ({"type": "server_vad"}, "model", True, True),
        ({"type": "semantic_vad", "eagerness": "low"}, "model", True, True),
        ({"type": "server_vad", "create_response": False}, "application", True, True),
        ({"type": "server_vad", "interrupt_response": False}, "model", True, False),
        ({"type": "server_vad", "create_response": None, "threshold": None}, "model", True, True),
    ],
)
def test_who_owns_the_turns(turn: Any, owner: str, detects: bool, interrupts: bool) -> None:
    for session in ({"turn_detection": turn}, {"audio": {"input": {"turn_detection": turn}}}):
        config = GA.updated(session)
        assert (config.owner, config.detects_speech, config.interrupts) == (owner, detects, interrupts)
    if interrupts or not detects:
        assert DUPLEX.updated({"turn_detection": turn}).owner == "model"


def test_formats_in_every_spelling() -> None:
    for session in (
        {"input_audio_format": "g711_ulaw"},
        {"audio": {"input": {"format": "g711_ulaw"}}},
        {"audio": {"input": {"format": {"type": "audio/pcmu"}}}},
    ):
        config = GA.updated(session)
        assert config.input_format == WireFormat("audio/pcmu", 8_000)
        assert config.as_json("x")["audio"]["input"]["format"] == {"type": "audio/pcmu"}
        assert config.as_beta_json("x")["input_audio_format"] == "g711_ulaw"
    config = DUPLEX.updated({"sample_rate_hz": 16_000, "audio": {"output": {"sample_rate_hz": 22_050}}})
    assert (config.input_format.rate_hz, config.output_format.rate_hz) == (16_000, 22_050)


def test_tools_flat_and_wrapped_and_none_by_choice() -> None:
    flat = {"type": "function", "name": "a", "description": "A.", "parameters": {"type": "object"}}
    wrapped = {"type": "function", "function": {"name": "b"}}
    config = GA.updated({"tools": [flat, wrapped]})
    assert [tool.name for tool in config.tools] == ["a", "b"]
    assert config.as_json("x")["tools"][0] == flat
    assert config.prompt[1] == config.tools
    assert config.updated({"tool_choice": "none"}).prompt[1] == ()
