// What was said, cut into turns as it comes. No browser needed.

import { FRAME_SECONDS } from "./protocol.js";

const PAUSE_FRAMES = 12; // a second: who was quiet for so long while others spoke begins a new turn
const LONG_PAUSE_FRAMES = 50; // four seconds: a new turn in any case

const GLUED_FRAMES = 5; // after so long a sentence that no space divides from the last begins a new turn
const SENTENCE_END = /[.!?\u2026]["')\]\u201d\u2019]*$/;

const SPEAKERS = {
  "conversation.item.input_audio_transcription.delta": ["user", "transcript"],
  "response.text.delta": ["assistant", "text"],
  "response.function.delta": ["function", "text"],
};

/**
 * Turns {speaker, text, frame} in the order they began; the server's cumulative texts are the truth. One that is no more
 * than its delta has begun anew, as a transcript does with each turn of push to talk.
 */
export class Captions {
  constructor() {
    this.turns = [];
    this.channels = new Map();
    this.calls = new Map(); // of tools: call id -> turn
  }

  /** Takes an event; the turn that it changed, or null. */
  take(event) {
    if (event.type === "tool.call") return this.call(event);
    if (event.type === "tool.result") return this.called(event, ` → ${event.result}`);
    if (event.type === "tool.failed") return this.called(event, ` failed (${event.reason.replaceAll("_", " ")})`);
    const [speaker, field] = SPEAKERS[event.type] ?? [];
    if (!speaker) return null;
    const all = String(event[field] ?? "");
    const frame = event.frame_index;
    let channel = this.channels.get(speaker);
    const anew = all.length < (channel?.length ?? 0) && all.trim() === String(event.delta ?? "").trim();
    if (!channel || anew || this.isOver(channel, frame) || isGlued(channel, all, frame)) {
      channel = { turn: null, from: anew ? 0 : (channel?.length ?? 0) };
      this.channels.set(speaker, channel);
    }
    channel.length = all.length;
    channel.frame = frame;
    const text = all.slice(Math.min(channel.from, all.length)).trim();
    if (!channel.turn) {
      if (text === "") return null;
      channel.turn = { speaker, text, frame };
      this.turns.push(channel.turn);
    }
    channel.turn.text = text;
    return channel.turn;
  }

  /** A tool's call and what became of it are one line. */
  call({ call_id: id, name, arguments: values, frame_index: frame }) {
    return this.line(id, `${name}(${named(values)})`, frame);
  }

  called({ call_id: id, raw = "a call", frame_index: frame }, outcome) {
    const turn = this.calls.get(id) ?? this.line(id, raw, frame);
    turn.text += outcome;
    return turn;
  }

  line(id, text, frame) {
    const turn = { speaker: "tool", text, frame };
    this.calls.set(id, turn);
    this.turns.push(turn);
    return turn;
  }

  isOver({ turn, frame: last }, frame) {
    if (!turn) return false;
    const interrupted = isSpeech(turn) && this.turns.findLast(isSpeech) !== turn;
    return frame - last > (interrupted ? PAUSE_FRAMES : LONG_PAUSE_FRAMES);
  }
}

function isGlued({ turn, length, frame: last }, all, frame) {
  if (!turn || !isSpeech(turn) || frame - last < GLUED_FRAMES) return false;
  return SENTENCE_END.test(all.slice(0, length)) && /^\S/.test(all.slice(length));
}

function isSpeech({ speaker }) {
  return speaker === "user" || speaker === "assistant";
}

function named(values) {
  return Object.entries(values ?? {})
    .map(([name, value]) => `${name}=${JSON.stringify(value)}`)
    .join(", ");
}

/** The conversation as a text file. */
export function transcript(turns, { model, systemPrompt, seed, started }) {
  const heading = [
    `Conversation of ${started} with ${model}`,
    `System prompt: ${systemPrompt || "(the model's own)"}`,
    `Seed: ${seed}`,
  ];
  const lines = turns.map(({ speaker, text, frame }) => `[${clock(frame * FRAME_SECONDS)}] ${speaker}: ${text}`);
  return [...heading, "", ...lines, ""].join("\n");
}

function clock(seconds) {
  const minutes = Math.floor(seconds / 60);
  return `${String(minutes).padStart(2, "0")}:${(seconds - 60 * minutes).toFixed(1).padStart(4, "0")}`;
}
