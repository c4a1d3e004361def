import assert from "node:assert/strict";
import { test } from "node:test";

import { JitterBuffer, peak } from "../../server/static/jitter.js";

const RATE = 48000;
const FRAME = 3840;
const QUANTUM = 128;

function frame(value) {
  return new Float32Array(FRAME).fill(value);
}

function pull(buffer, samples) {
  const output = new Float32Array(samples);
  for (let start = 0; start < samples; start += QUANTUM) buffer.pull(output.subarray(start, start + QUANTUM));
  return output;
}

test("it begins with two frames, and then gives every sample once and in order", () => {
  const buffer = new JitterBuffer(RATE);
  const signal = Float32Array.from({ length: 5 * FRAME }, (_, index) => Math.sin(index / 20) / 2);
  buffer.push(signal.slice(0, FRAME));
  assert.equal(peak(pull(buffer, QUANTUM)), 0);
  for (let index = 1; index < 5; index++) buffer.push(signal.slice(index * FRAME, (index + 1) * FRAME));
  const output = pull(buffer, 5 * FRAME);
  const faded = 0.003 * RATE + 1;
  assert.deepEqual(output.subarray(faded), signal.subarray(faded));
  assert.equal(buffer.starved, 0);
});

test("starved, it waits for a frame more, up to four, and dies away without a step", () => {
  const buffer = new JitterBuffer(RATE);
  for (const target of [3, 4, 4]) {
    for (let index = 0; index < buffer.target; index++) buffer.push(frame(0.5));
    const output = pull(buffer, 5 * FRAME);
    const steps = output.slice(1).map((sample, index) => Math.abs(sample - output[index]));
    assert.ok(Math.max(...steps) < 0.02, `${Math.max(...steps)}`);
    assert.equal(output.at(-1), 0);
    assert.equal(buffer.target, target);
  }
  assert.equal(buffer.starved, 3);
  buffer.push(frame(0.5));
  buffer.push(frame(0.5));
  buffer.push(frame(0.5));
  assert.equal(peak(pull(buffer, QUANTUM)), 0);
});

test("after a calm while it gives the frame back, in a pause and without a step", () => {
  const buffer = new JitterBuffer(RATE);
  buffer.target = 4;
  for (let index = 0; index < 4; index++) buffer.push(frame(0.5));
  for (let index = 0; index < 300; index++) {
    buffer.push(frame(0.5));
    pull(buffer, FRAME);
  }
  assert.equal(buffer.target, 2);
  assert.ok(buffer.samples >= 4 * FRAME, "a word is never cut");
  const before = buffer.samples;
  buffer.push(frame(0.001));
  assert.equal(buffer.samples - before, 0.01 * RATE);
  for (let index = 0; index < 8; index++) {
    buffer.push(frame(0));
    pull(buffer, FRAME);
  }
  assert.ok(buffer.samples <= 3 * FRAME);
  assert.equal(buffer.starved, 0);
});

test("cleared, it is silent within milliseconds, without a step, and begins anew", () => {
  const buffer = new JitterBuffer(RATE);
  for (let index = 0; index < 4; index++) buffer.push(frame(0.5));
  pull(buffer, FRAME);
  buffer.clear();
  assert.equal(buffer.seconds, 0);
  const output = pull(buffer, 8 * QUANTUM);
  assert.ok(Math.abs(output[0] - 0.5) < 0.02);
  assert.equal(output.at(-1), 0);
  assert.equal(buffer.starved, 0);
  buffer.push(frame(0.25));
  assert.equal(peak(pull(buffer, QUANTUM)), 0);
  buffer.push(frame(0.25));
  assert.ok(peak(pull(buffer, 2 * QUANTUM)) === 0.25);
});
