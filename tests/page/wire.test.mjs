import assert from "node:assert/strict";
import { test } from "node:test";

import * as protocol from "../../server/static/protocol.js";
import { Recording } from "../../server/static/recording.js";
import { Timing } from "../../server/static/timing.js";
import { ended, insecure, refused } from "../../server/static/words.js";
import { tone } from "./tone.mjs";

test("samples cross as base64 of little-endian PCM16, clipped and never wrapped", () => {
  const pcm = protocol.toPcm(new Float32Array([0, 1, -1, 2, -2, 0.5, 1e-5]));
  assert.deepEqual([...pcm], [0, 32767, -32768, 32767, -32768, 16384, 0]);
  assert.equal(protocol.toBase64(Int16Array.of(1, -2)), Buffer.from([1, 0, 254, 255]).toString("base64"));
  assert.deepEqual(protocol.fromBase64(protocol.toBase64(pcm)), pcm);
  assert.deepEqual([...protocol.toFloat(Int16Array.of(32767, 0, -32767))], [1, 0, -1]);
});

test("a key travels as a subprotocol, and an empty prompt is the model's own", () => {
  assert.deepEqual(protocol.subprotocols(""), ["realtime"]);
  assert.deepEqual(protocol.subprotocols("k.1"), ["realtime", "openai-insecure-api-key.k.1"]);
  assert.ok(protocol.isSendable("sk-A_1.~") && !protocol.isSendable("two words") && !protocol.isSendable("é"));
  assert.deepEqual(protocol.sessionUpdate({ systemPrompt: "", seed: 3 }).session, { seed: 3, extensions: true });
  const { session } = protocol.sessionUpdate({ systemPrompt: "Be brief.", seed: 0 });
  assert.deepEqual(session, { system_prompt: "Be brief.", seed: 0, extensions: true });
  assert.equal(protocol.sessionUpdate({ systemPrompt: "", seed: 0, pushToTalk: true }).session.turns, "application");
});

test("the figures: a server's own time for a frame, and what it has not answered", () => {
  const timing = new Timing();
  assert.equal(timing.realtimeFactor, null);
  for (let index = 0; index < 10; index++) timing.sent(0.08 * index);
  assert.ok(Math.abs(timing.lagSeconds - 0.8) < 1e-9);
  for (let index = 0; index < 10; index++) timing.answered(1 + 0.12 * index); // one after the other
  assert.equal(timing.lagSeconds, 0);
  for (let index = 0; index < 25; index++) {
    timing.sent(10 + 0.08 * index);
    timing.answered(10.02 + 0.08 * index); // each at once
  }
  assert.ok(Math.abs(timing.realtimeFactor - 0.25) < 1e-9);
  timing.answered(99);
  assert.equal(timing.lagSeconds, 0);
});

test("the WAV has both sides on one timeline, the user left at 22.05 kHz and the assistant right as sent", () => {
  const recording = new Recording();
  const frames = 10;
  for (let index = 0; index < frames; index++) {
    recording.heard(Int16Array.from({ length: 1280 }, (_, at) => 10000 * tone(1280 * index + at, 16000)));
    if (index % 3 === 0) recording.spoken(index, new Int16Array(1764).fill(100 + index));
  }
  const bytes = Buffer.concat([...recording.wav()].map((part) => Buffer.from(part)));
  assert.equal(bytes.toString("latin1", 0, 4), "RIFF");
  assert.equal(bytes.readUInt32LE(4), bytes.length - 8);
  assert.deepEqual([bytes.readUInt16LE(22), bytes.readUInt32LE(24), bytes.readUInt16LE(34)], [2, 22050, 16]);
  assert.equal(bytes.readUInt32LE(40), 4 * 1764 * frames);
  assert.equal(bytes.length, 44 + 4 * 1764 * frames);
  for (let index = 300; index < 1764 * frames - 300; index++) {
    const left = bytes.readInt16LE(44 + 4 * index);
    assert.ok(Math.abs(left - 10000 * tone(index, 22050)) < 3, `${index}: ${left}`);
    const at = Math.floor(index / 1764);
    assert.equal(bytes.readInt16LE(46 + 4 * index), at % 3 === 0 ? 100 + at : 0);
  }
});

test("every end has its words", () => {
  const words = (close) => ended({ reason: "", error: null, finished: false, ...close });
  assert.deepEqual(words({ code: 1013, error: { code: "server_busy", message: "" } })[0], "busy");
  assert.match(words({ code: 1008, error: { code: "slow_consumer", message: "" } })[1], /fast enough/);
  const idle = { code: "invalid_request", message: "Idle for 120 s." };
  assert.match(words({ code: 1008, error: idle })[1], /Idle for 120 s/);
  const limit = { code: "inference_error", message: "The limit of 600 s." };
  assert.match(words({ code: 1000, error: limit })[1], /limit of 600 s/);
  const unopened = { code: "session_initialization_failed", message: "The prompt is too long." };
  assert.match(words({ code: 1005, error: unopened })[1], /did not begin: The prompt is too long/);
  assert.match(words({ code: 1001 })[1], /shutting down/);
  assert.match(words({ code: 1006 })[1], /broke/);
  assert.match(words({ code: 1009, reason: "too big" })[1], /1009.*too big/);
  assert.deepEqual(words({ code: 1000, finished: true })[0], "ready");
});

test("every refusal says what to do", () => {
  assert.match(refused({ health: "unreachable", status: 0 }), /mlx-voicechat serve/);
  assert.match(refused({ health: "ready", status: 401, key: "" }), /asks for an API key/);
  assert.match(refused({ health: "ready", status: 401, key: "k" }), /does not accept/);
  const elsewhere = { health: "ready", status: 426, origin: "https://mac.local:8080" };
  assert.match(refused(elsewhere), /--allowed-origins https:\/\/mac.local:8080/);
  const advice = insecure({ hostname: "mac.local", port: "8080" });
  assert.match(advice, /http:\/\/localhost:8080\/.*--ssl-certfile.*https:\/\/mac.local:8080\//);
});
