// Both sides of a conversation on its timeline, and the WAV file of it. No browser needed.

import { FRAME_SECONDS, INPUT_FRAME_SAMPLES, INPUT_RATE_HZ, OUTPUT_FRAME_SAMPLES, OUTPUT_RATE_HZ } from "./protocol.js";
import { Resampler } from "./resampler.js";

const HEADER_BYTES = 44;
const CHANNELS = 2;

/** What was sent, frame by frame, and what came back for each frame: Int16Arrays. */
export class Recording {
  constructor() {
    this.user = [];
    this.assistant = [];
  }

  heard(pcm) {
    this.user.push(pcm);
  }

  spoken(frameIndex, pcm) {
    this.assistant[frameIndex] = pcm;
  }

  get frames() {
    return Math.max(this.user.length, this.assistant.length);
  }

  get seconds() {
    return this.frames * FRAME_SECONDS;
  }

  /** The WAV file in parts: 22.05 kHz, 16 bits, the user left and the assistant right; silence where nothing came. */
  *wav() {
    yield header(this.frames * OUTPUT_FRAME_SAMPLES);
    const resampler = new Resampler(INPUT_RATE_HZ, OUTPUT_RATE_HZ);
    let left = [];
    let right = [];
    for (let index = 0; index < this.frames; index++) {
      const heard = this.user[index] ?? new Int16Array(INPUT_FRAME_SAMPLES);
      left = joined(left, resampler.push(heard));
      if (index === this.frames - 1) left = joined(left, resampler.flush());
      right = joined(right, this.assistant[index] ?? new Int16Array(OUTPUT_FRAME_SAMPLES));
      const count = Math.min(left.length, right.length);
      yield interleaved(left, right, count);
      left = left.slice(count);
      right = right.slice(count);
    }
  }
}

function joined(first, second) {
  const all = new Float32Array(first.length + second.length);
  all.set(first);
  all.set(second, first.length);
  return all;
}

/** `count` samples of both channels as little-endian PCM16. */
function interleaved(left, right, count) {
  const view = new DataView(new ArrayBuffer(2 * CHANNELS * count));
  for (let index = 0; index < count; index++) {
    view.setInt16(4 * index, clipped(left[index]), true);
    view.setInt16(4 * index + 2, clipped(right[index]), true);
  }
  return view.buffer;
}

function clipped(value) {
  return Math.round(Math.max(-32768, Math.min(32767, value)));
}

function header(samples) {
  const bytes = 2 * CHANNELS * samples;
  const view = new DataView(new ArrayBuffer(HEADER_BYTES));
  const text = (at, letters) => {
    for (let index = 0; index < letters.length; index++) view.setUint8(at + index, letters.charCodeAt(index));
  };
  text(0, "RIFF");
  view.setUint32(4, HEADER_BYTES - 8 + bytes, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of this chunk
  view.setUint16(20, 1, true); // integers
  view.setUint16(22, CHANNELS, true);
  view.setUint32(24, OUTPUT_RATE_HZ, true);
  view.setUint32(28, 2 * CHANNELS * OUTPUT_RATE_HZ, true);
  view.setUint16(32, 2 * CHANNELS, true);
  view.setUint16(34, 16, true); // bits
  text(36, "data");
  view.setUint32(40, bytes, true);
  return view.buffer;
}
