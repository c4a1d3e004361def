import assert from "node:assert/strict";
import { test } from "node:test";

import { EchoGate, energyOf, FarSide } from "../../server/static/echo-gate.js";

function passing(gate, far, left, blocks) {
  return Array.from({ length: blocks }, () => gate.passes(10 ** (far / 10), 10 ** (left / 10)));
}

function runs(values) {
  const found = [];
  for (const value of values) {
    if (found.at(-1)?.[0] === value) found.at(-1)[1] += 1;
    else found.push([value, 1]);
  }
  return found;
}

for (const delayMs of [0, 100]) {
  test(`nothing is sent while the assistant sounds and 240 ms after, with ${delayMs} ms of delay`, () => {
    const gate = new EchoGate(delayMs);
    assert.deepEqual(runs(passing(gate, -100, -60, 50)), [[true, 50]]);
    assert.deepEqual(runs(passing(gate, -20, -60, 50)), [[false, 50]]);
    const hang = 24 + delayMs / 10;
    assert.deepEqual(runs(passing(gate, -100, -60, 60)), [
      [false, hang],
      [true, 60 - hang],
    ]);
  });
}

test("who is louder than -40 dB over 80 ms is heard, a peak is not", () => {
  const gate = new EchoGate();
  passing(gate, -20, -60, 20);
  assert.deepEqual(passing(gate, -20, -32, 1), [false]);
  assert.deepEqual(runs(passing(gate, -20, -60, 20)), [[false, 20]]);
  const other = new EchoGate();
  passing(other, -20, -60, 101);
  assert.deepEqual(runs(passing(other, -20, -25, 20)), [[true, 20]]);
  assert.deepEqual(runs(passing(other, -20, -70, 20)), [
    [true, 7],
    [false, 13],
  ]);
});

test("in the first second of an answer a burst is not sent, a speaker is", () => {
  const gate = new EchoGate();
  passing(gate, -20, -60, 20);
  assert.deepEqual(runs(passing(gate, -20, -25, 5)), [[false, 5]]);
  assert.deepEqual(runs(passing(gate, -20, -60, 8)), [[false, 8]]);
  assert.deepEqual(runs(passing(gate, -20, -25, 20)), [
    [false, 5],
    [true, 15],
  ]);
});

test("the threshold follows what is left, from -46 to -30 dB", () => {
  const gate = new EchoGate();
  passing(gate, -20, -38, 500);
  assert.ok(Math.abs(gate.thresholdDbfs + 32) < 0.1, `${gate.thresholdDbfs}`);
  passing(gate, -10, -25, 1000);
  assert.equal(gate.thresholdDbfs, -30);
  passing(gate, -20, -70, 5000);
  assert.equal(gate.thresholdDbfs, -46);
});

test("the threshold does not follow a speaker, nor what is heard in pauses", () => {
  const gate = new EchoGate();
  passing(gate, -20, -26, 1000);
  passing(gate, -100, -38, 1000);
  assert.equal(gate.thresholdDbfs, -40);
});

test("the far side is what was played since the last block", () => {
  const far = new FarSide();
  assert.equal(far.take(), null);
  far.add(Float32Array.of(0.5, -0.5));
  far.add(Float32Array.of(0, 0));
  assert.equal(far.take(), 0.125);
  assert.equal(far.take(), null);
  assert.equal(energyOf(Float32Array.of(0.5, -0.5, 0.5, -0.5)), 0.25);
});
