// The page: what a person presses and sees. The conversation itself is in conversation.js.

import { transcript } from "./captions.js";
import { health } from "./connection.js";
import { Conversation } from "./conversation.js";
import { isSendable } from "./protocol.js";
import { insecure, NO_SERVER, STATES, WRONG_KEY } from "./words.js";

const PART_FRAMES = 100; // of a WAV between two breaths of the page
const POLL_MS = 1000;
const METER_FLOOR_DB = 60;
const STABLE_MS = 1000; // a turn that did not grow for so long is read aloud
const NEAR_PX = 80; // of the captions' end: they scroll on
const NAMES = { user: "You", assistant: "Assistant", tool: "Tool" };
const FIELDS = "input, textarea, select, button, [contenteditable]"; // where the space bar has its own meaning

const $ = (id) => document.getElementById(id);
const switches = { muted: false, halfDuplex: false };
let conversation = null; // the last one, while it runs and after
let kept = null; // the one whose captions are shown, which can be saved
const shown = new Map(); // turns -> { item, text, timer }

// -- the conversation

function talk() {
  if (!$("settings").reportValidity()) return;
  const previous = conversation?.gone;
  const settings = {
    systemPrompt: $("prompt").value,
    seed: Number($("seed").value),
    pushToTalk: $("push-to-talk").checked,
  };
  conversation = new Conversation({ settings, key: $("key").value, switches, view, previous });
  setRunning(true);
  notice("");
  conversation.start();
}

function setRunning(running) {
  const focused = document.activeElement;
  $("talk").hidden = running;
  $("stop").hidden = !running;
  $("opening").disabled = running;
  if (!running) {
    $("interrupt").disabled = true;
    $("turn").hidden = true;
  }
  if ([$("talk"), $("stop"), $("turn")].includes(focused)) (running ? $("stop") : $("talk")).focus();
}

/** What a conversation may change on the page. */
const view = {
  state: showState,
  notice,
  turn: showTurn,
  level: showLevel,
  begun() {
    kept = conversation;
    shown.clear();
    $("captions").replaceChildren();
    $("functions").textContent = "";
    $("function").hidden = true;
    $("saving").hidden = true;
    $("interrupt").disabled = false;
    if (!conversation.settings.pushToTalk) return;
    showWhoseTurn();
    $("turn").hidden = false;
    if (document.activeElement === $("stop")) $("turn").focus();
  },
  ended() {
    setRunning(false);
    $("saving").hidden = !kept?.recording.frames;
  },
  figures({ timing }) {
    const factor = timing.realtimeFactor;
    $("factor").textContent = factor === null ? "–" : factor.toFixed(2);
    $("lag").textContent = `${timing.lagSeconds.toFixed(1)} s`;
  },
  askForKey() {
    $("key").focus();
  },
};

// -- what is shown

function showState(name, words) {
  document.body.dataset.state = name;
  $("state").textContent = STATES[name][0];
  $("words").textContent = words;
}

function notice(words) {
  $("notice").textContent = words;
  $("notice").hidden = words === "";
}

function showLevel(peak) {
  const level = peak > 0 ? Math.max(0, 1 + (20 * Math.log10(peak)) / METER_FLOOR_DB) : 0;
  $("level").style.setProperty("--level", Math.min(1, level).toFixed(3));
  $("meter").setAttribute("aria-valuenow", Math.round(100 * Math.min(1, level)));
}

function showTurn(turn) {
  if (turn.speaker === "function") {
    const said = kept.captions.turns.filter(({ speaker }) => speaker === "function");
    $("functions").textContent = said.map(({ text }) => text).join("\n");
    $("function").hidden = false;
    return;
  }
  const captions = $("captions");
  const follow = captions.scrollHeight - captions.scrollTop - captions.clientHeight < NEAR_PX;
  const entry = shown.get(turn) ?? addTurn(turn);
  entry.text.textContent = turn.text;
  entry.item.setAttribute("aria-busy", "true");
  clearTimeout(entry.timer);
  entry.timer = setTimeout(() => entry.item.removeAttribute("aria-busy"), STABLE_MS);
  if (follow) captions.scrollTop = captions.scrollHeight;
}

function addTurn(turn) {
  const item = document.createElement("div");
  item.className = `turn ${turn.speaker}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = NAMES[turn.speaker];
  const text = document.createElement("span");
  text.className = "text";
  item.append(who, text);
  $("captions").append(item);
  const entry = { item, text, timer: 0 };
  shown.set(turn, entry);
  return entry;
}

// -- saving

async function saveSound() {
  const parts = [];
  for (const part of kept.recording.wav()) {
    parts.push(part);
    if (parts.length % PART_FRAMES === 0) await new Promise((resolve) => setTimeout(resolve));
  }
  download(new Blob(parts, { type: "audio/wav" }), "wav");
}

function saveText() {
  const { captions, settings, model, started } = kept;
  const text = transcript(captions.turns, { ...settings, model, started: started.toLocaleString() });
  download(new Blob([text], { type: "text/plain;charset=utf-8" }), "txt");
}

function download(blob, suffix) {
  const stamp = kept.started.toISOString().slice(0, 19).replace(/[:T]/g, "-");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `voicechat-${stamp}.${suffix}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// -- the beginning

/** Look for the server until it is ready, or until a conversation begins. */
async function look() {
  const status = await health();
  if (conversation) return;
  $("talk").disabled = false;
  if (status === "unreachable") {
    showState("lost", NO_SERVER);
    return;
  }
  const name = { loading: "loading", warming: "loading", busy: "busy" }[status] ?? "ready";
  showState(name, STATES[name][1]);
  if (name !== "ready") setTimeout(look, POLL_MS);
}

function checkKey() {
  $("key").setCustomValidity(isSendable($("key").value) ? "" : WRONG_KEY);
}

function toggleMute() {
  switches.muted = !switches.muted;
  $("mute").setAttribute("aria-pressed", String(switches.muted));
  conversation?.sayTurn();
}

function toggleHalfDuplex() {
  switches.halfDuplex = $("half-duplex").checked;
  conversation?.sayTurn();
}

function changeTurn() {
  conversation.changeTurn();
  showWhoseTurn();
}

function showWhoseTurn() {
  $("turn").textContent = conversation.yourTurn ? "Done" : "Start speaking";
}

function pressKey(event) {
  if (event.key !== " " || event.repeat || $("turn").hidden || event.target.matches(FIELDS)) return;
  event.preventDefault();
  changeTurn();
}

function setTheme() {
  document.documentElement.style.colorScheme = $("theme").value;
}

$("talk").addEventListener("click", talk);
$("stop").addEventListener("click", () => conversation.stop());
$("interrupt").addEventListener("click", () => conversation.interrupt());
$("turn").addEventListener("click", changeTurn);
document.addEventListener("keydown", pressKey);
$("mute").addEventListener("click", toggleMute);
$("half-duplex").addEventListener("change", toggleHalfDuplex);
$("theme").addEventListener("change", setTheme);
$("key").addEventListener("input", checkKey);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("save-sound").addEventListener("click", saveSound);
$("save-text").addEventListener("click", saveText);

if (!window.isSecureContext || !navigator.mediaDevices?.getUserMedia || !window.AudioWorkletNode) {
  showState("microphone", insecure(location));
} else {
  look();
}
