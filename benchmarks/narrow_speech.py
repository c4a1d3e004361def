"""What narrower speech weights or caches change: the same recordings answered with float32 and with the option.

    python benchmarks/narrow_speech.py --speech-weights q8 [MODEL ...]
    python benchmarks/narrow_speech.py --kv-cache bf16 [MODEL ...]

Every recording of examples/questions.json, with 4 s of silence after it. Codes feed back, so after the first other one
all that follow may differ: the last columns say how far another seed of the sampler moves the same float32 speech.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import librosa
import mlx.core as mx
import numpy as np
import soundfile as sf

import mlx_voicechat
from mlx_voicechat.voicechat import Answer, VoiceChat

EXAMPLES = Path(__file__).parents[1] / "examples"
EXTRA_SECONDS = 4.0
COLUMNS = ("recording", "text equal", "codes equal", "first other frame", "log-mel", "seed: codes", "seed: log-mel")


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech-weights", choices=["f32", "q8"], default="f32")
    parser.add_argument("--kv-cache", choices=["f32", "bf16"], default="f32")
    parser.add_argument("models", nargs="*", default=["tiny"])
    options = vars(parser.parse_args())
    models = options.pop("models")
    questions = [item["file"] for item in json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))]
    for name in models:
        exact, packed = mlx_voicechat.load(name, speech_weights="f32"), mlx_voicechat.load(name, **options)
        rows = [(file, *compare(exact, packed, EXAMPLES / file)) for file in questions]
        print(f"\n{name}: float32 against {options}\n")
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
        for file, texts, codes, first, mel, other_codes, other_mel in rows:
            print(f"| {file} | {texts} | {codes:.1%} | {first} | {mel:.3f} | {other_codes:.1%} | {other_mel:.3f} |")
        equal, codes, mel, other_codes, other_mel = (float(np.mean([r[i] for r in rows])) for i in (1, 2, 4, 5, 6))
        print(f"| all | {equal:.0%} | {codes:.1%} | | {mel:.3f} | {other_codes:.1%} | {other_mel:.3f} |")
        heard, spoken = (relative(part(exact), part(packed)) for part in (encoder_output, backbone_output))
        print(
            f"\nOn equal input the encoder's output differs by {heard:.2%} (rms), the TTS backbone's by {spoken:.2%}."
        )


def compare(exact: VoiceChat, packed: VoiceChat, file: Path) -> tuple[bool, float, int | str, float, float, float]:
    """Text and transcript equal, share of equal codes, first frame with another, log-mel distance; again by seed."""
    audio, rate_hz = sf.read(file, dtype="float32")
    reference, answer, reseeded = (
        model.answer(audio, rate_hz, EXTRA_SECONDS, seed=seed) for model, seed in ((exact, 0), (packed, 0), (exact, 1))
    )
    texts = (answer.transcript, answer.text, answer.function) == (
        reference.transcript,
        reference.text,
        reference.function,
    )
    others = np.flatnonzero((answer.codes != reference.codes).any(axis=1))
    first = f"{others[0]} of {len(reference.codes)}" if len(others) else "none"
    return (
        texts,
        *distance(answer, reference)[:1],
        first,
        distance(answer, reference)[1],
        *distance(reseeded, reference),
    )


def distance(answer: Answer, reference: Answer) -> tuple[float, float]:
    """Share of equal codes, and mean difference of the log-mel spectra."""
    mels = [log_mel(side.samples, side.rate_hz) for side in (answer, reference)]
    return float((answer.codes == reference.codes).mean()), float(np.abs(mels[0] - mels[1]).mean())


def encoder_output(model: VoiceChat) -> mx.array:
    """Encoder frames of the first recording."""
    audio, _ = sf.read(EXAMPLES / "question.wav", dtype="float32")
    return model.perception.whole(mx.array(audio)[None])[0]


def backbone_output(model: VoiceChat) -> mx.array:
    """Hidden states of the voice prompt."""
    tts = model.tts
    return tts.backbone(tts.prompt_inputs(model.voice(None), 1, 1), tts.init_state().caches)


def relative(reference: mx.array, other: mx.array) -> float:
    return float(mx.sqrt(mx.mean(mx.square(other - reference)) / mx.mean(mx.square(reference))))


def log_mel(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    mel = librosa.feature.melspectrogram(y=samples, sr=rate_hz, n_fft=1024, hop_length=441, n_mels=40)
    return np.log(mel + 1e-4)


if __name__ == "__main__":
    main()
