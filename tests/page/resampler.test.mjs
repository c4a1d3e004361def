import assert from "node:assert/strict";
import { test } from "node:test";

import { Resampler } from "../../server/static/resampler.js";
import { tone, toneError } from "./tone.mjs";

const SECONDS = 10; // benchmarks/page_resampler.mjs does an hour

for (const rate of [44100, 48000]) {
  for (const block of [128, 441, 1024]) {
    test(`microphone: ${rate} Hz in blocks of ${block} keeps length and tone`, () => {
      const { missing, errorDb, worst } = toneError(rate, 16000, block, SECONDS);
      assert.equal(missing, 0);
      assert.ok(errorDb < -60, `${errorDb} dB`);
      assert.ok(worst < 1e-3, `${worst}`);
    });
  }
  test(`loudspeaker: frames of 22050 Hz to ${rate} Hz keep length and tone`, () => {
    const { missing, errorDb, worst } = toneError(22050, rate, 1764, SECONDS);
    assert.equal(missing, 0);
    assert.ok(errorDb < -60, `${errorDb} dB`);
    assert.ok(worst < 1e-3, `${worst}`);
  });
}

test("any blocks give what the whole gives, and a flushed resampler is as new", () => {
  const signal = Float32Array.from({ length: 5000 }, (_, index) => tone(index, 44100));
  const resampler = new Resampler(44100, 16000);
  const whole = [...resampler.push(signal), ...resampler.flush()];
  const parts = [];
  for (let start = 0, size = 1; start < signal.length; start += size, size = (7 * size) % 331) {
    parts.push(...resampler.push(signal.subarray(start, start + size)));
  }
  parts.push(...resampler.flush());
  assert.equal(whole.length, Math.round((5000 * 16000) / 44100));
  assert.deepEqual(parts, whole);
});

test("a block may give nothing, and a short signal keeps its length", () => {
  const resampler = new Resampler(48000, 16000);
  assert.equal(resampler.push(new Float32Array(1)).length, 0);
  assert.equal(resampler.push(new Float32Array(0)).length, 0);
  assert.equal(resampler.flush().length, 0);
  resampler.push(new Float32Array(4));
  assert.equal(resampler.flush().length, 1);
});

test("what 16 kHz cannot hold does not come back as another tone", () => {
  const resampler = new Resampler(48000, 16000);
  const high = Float32Array.from({ length: 48000 }, (_, index) => Math.sin((2 * Math.PI * 9000 * index) / 48000));
  const output = resampler.push(high).subarray(200);
  assert.ok(Math.max(...output.map(Math.abs)) < 1e-3);
});

test("equal rates change nothing", () => {
  const signal = Float32Array.from({ length: 300 }, (_, index) => tone(index, 16000));
  const resampler = new Resampler(16000, 16000);
  const output = [...resampler.push(signal), ...resampler.flush()];
  assert.equal(output.length, 300);
  assert.ok(output.every((sample, index) => index < 50 || index > 250 || Math.abs(sample - signal[index]) < 1e-3));
});
