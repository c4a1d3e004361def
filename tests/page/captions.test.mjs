import assert from "node:assert/strict";
import { test } from "node:test";

import { Captions, transcript } from "../../server/static/captions.js";

const TRANSCRIPT = "conversation.item.input_audio_transcription.delta";
const heard = (frame_index, delta, transcript) => ({ type: TRANSCRIPT, frame_index, delta, transcript });
const said = (frame_index, delta, text) => ({ type: "response.text.delta", frame_index, delta, text });
const called = (frame_index, delta, text) => ({ type: "response.function.delta", frame_index, delta, text });
const brief = ({ turns }) => turns.map(({ speaker, text }) => `${speaker}: ${text}`);

test("a question, its answer, the next question: a turn each, though the last word comes late", () => {
  const captions = new Captions();
  captions.take(heard(5, "What is", "What is"));
  captions.take(said(9, "The", "The"));
  captions.take(heard(10, " it?", "What is it?"));
  captions.take(said(11, " thing.", "The thing."));
  captions.take(heard(60, " And", "What is it? And"));
  captions.take(heard(62, " now?", "What is it? And now?"));
  captions.take(said(90, " Now.", "The thing. Now."));
  const turns = ["user: What is it?", "assistant: The thing.", "user: And now?", "assistant: Now."];
  assert.deepEqual(brief(captions), turns);
});

test("a speaker who pauses is one turn, after four seconds a new one", () => {
  const captions = new Captions();
  captions.take(said(0, "One", "One"));
  captions.take(said(40, " two", "One two"));
  captions.take(said(100, " three", "One two three"));
  assert.deepEqual(brief(captions), ["assistant: One two", "assistant: three"]);
});

test("a sentence that no space divides from the last is a new turn after a pause, an abbreviation is none", () => {
  const captions = new Captions();
  captions.take(said(0, "The lights of the U.", "The lights of the U."));
  captions.take(said(1, "S. are on.", "The lights of the U.S. are on."));
  captions.take(said(20, "The", "The lights of the U.S. are on.The"));
  captions.take(said(21, " sky.", "The lights of the U.S. are on.The sky."));
  captions.take(said(30, " Is blue.", "The lights of the U.S. are on.The sky. Is blue."));
  const turns = ["assistant: The lights of the U.S. are on.", "assistant: The sky. Is blue."];
  assert.deepEqual(brief(captions), turns);
});

test("the cumulative text is the truth, also when it is revised", () => {
  const captions = new Captions();
  captions.take(said(0, "caf\ufffd", "caf\ufffd"));
  captions.take(said(1, "", "café"));
  captions.take(said(90, " ok", "café ok"));
  captions.take(said(91, "", "caf"));
  assert.deepEqual(brief(captions), ["assistant: café", "assistant: "]);
});

test("a transcript that begins anew is a new turn", () => {
  const captions = new Captions();
  captions.take(heard(5, "What is it?", "What is it?"));
  captions.take(said(9, "That.", "That."));
  captions.take(heard(20, "And", "And"));
  captions.take(heard(21, " now?", "And now?"));
  assert.deepEqual(brief(captions), ["user: What is it?", "assistant: That.", "user: And now?"]);
});

test("function text is a speaker apart and divides nobody's turn; other events are none", () => {
  const captions = new Captions();
  captions.take(said(0, "Wait", "Wait"));
  captions.take(called(5, "f(", "f("));
  captions.take(called(6, ")", "f()"));
  captions.take(said(30, " for it", "Wait for it"));
  assert.equal(captions.take({ type: "session.pong" }), null);
  assert.equal(captions.take(heard(31, "", "")), null);
  assert.deepEqual(brief(captions), ["assistant: Wait for it", "function: f()"]);
});

test("the text file names the model, the prompt, the seed and the time of each turn", () => {
  const turns = [{ speaker: "user", text: "Hello.", frame: 5 }, { speaker: "assistant", text: "Hi.", frame: 800 }];
  const text = transcript(turns, { model: "tiny", systemPrompt: "", seed: 7, started: "today" });
  const heading = "Conversation of today with tiny\nSystem prompt: (the model's own)\nSeed: 7\n";
  assert.equal(text, `${heading}\n[00:00.4] user: Hello.\n[01:04.0] assistant: Hi.\n`);
});

test("a tool's call and its result are one line, which divides nobody's turn", () => {
  const captions = new Captions();
  captions.take(said(0, "Wait", "Wait"));
  const call = { type: "tool.call", frame_index: 5, call_id: "call_1", name: "f", arguments: { a: 1, b: "x" } };
  captions.take(call);
  captions.take(said(30, " for it", "Wait for it"));
  const turn = captions.take({ type: "tool.result", frame_index: 40, call_id: "call_1", result: "rain" });
  assert.equal(turn.text, 'f(a=1, b="x") → rain');
  captions.take({ type: "tool.failed", frame_index: 41, call_id: "call_2", reason: "unknown_tool", raw: "g()" });
  captions.take({ type: "tool.result", frame_index: 42, call_id: "call_2", result: "{}" });
  const lines = ["assistant: Wait for it", 'tool: f(a=1, b="x") → rain', "tool: g() failed (unknown tool) → {}"];
  assert.deepEqual(brief(captions), lines);
});
