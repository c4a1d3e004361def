// One conversation, from Talk to its end: the audio, the connection, and what is kept of both sides.

import { Audio, NoFiles } from "./audio.js";
import { Captions } from "./captions.js";
import { Connection, health, plainStatus } from "./connection.js";
import { peak } from "./jitter.js";
import { append, fromBase64, INPUT_FRAME_SAMPLES, toFloat, toPcm } from "./protocol.js";
import { Recording } from "./recording.js";
import { Timing } from "./timing.js";
import {
  BEHIND,
  ended,
  HALF_DUPLEX,
  microphone,
  MICROPHONE_GONE,
  MUTED,
  NO_SOUND,
  refused,
  STATES,
  YOUR_TURN,
} from "./words.js";

const POLL_MS = 1000;
const GOODBYE_MS = 2000;
const SILENT_FRAMES = 12; // a second of zeros: not a quiet room, but no sound at all
const LOUD_PEAK = 0.05; // of a person who speaks
const BREATH_FRAMES = 6; // half a second between two words is still speaking
const QUIET_PEAK = 0.005; // of an assistant who does not
const YIELD_FRAMES = 2; // quiet ones after which an assistant who was spoken over has yielded
const BEHIND_SECONDS = 1; // a server that is late by less is not spoken of

/**
 * `view` is told: state(name, words), level(peak), turn(turn), figures(conversation), notice(words), begun(), ended().
 * `switches` { muted, halfDuplex } may change at any time. With `settings.pushToTalk` the person is heard only in their
 * turn: `yourTurn`, changed by `changeTurn`.
 */
export class Conversation {
  constructor({ settings, key, switches, view, previous }) {
    Object.assign(this, { settings, key, switches, view, previous });
    this.captions = new Captions();
    this.recording = new Recording();
    this.timing = new Timing();
    this.model = "";
    this.running = false; // between session.updated and the end
    this.over = false;
    this.speaking = false;
    this.yourTurn = false;
    this.buffer = null; // the playback's last report
    this.discarding = false; // speech, from an interruption until the server has seen it
    this.playFrom = 0;
    this.quietFrames = 0;
    this.silentFrames = 0;
    this.sinceLoud = Infinity; // frames since the person spoke
    this.remarked = null; // what the notice is about
  }

  /** Resolves when the socket is closed, or after a while. */
  get gone() {
    return Promise.race([this.connection?.gone, new Promise((resolve) => setTimeout(resolve, GOODBYE_MS))]);
  }

  /** Call it from a click. */
  async start() {
    this.say("connecting", "Opening the microphone.");
    try {
      this.audio = await Audio.open({
        onFrame: (heard) => this.hear(heard),
        onReport: (report) => this.report(report),
        onMicrophoneGone: () => this.remark("gone", MICROPHONE_GONE),
      });
    } catch (fault) {
      if (this.over) return;
      if (fault instanceof NoFiles) this.refused();
      else this.end("microphone", microphone(fault.name));
      return;
    }
    await this.previous; // its place at the server is free when its socket is closed
    if (this.over) this.audio.close();
    else this.connect();
  }

  connect() {
    this.say("connecting", "Opening the conversation.");
    this.connection = new Connection({
      key: this.key,
      settings: this.settings,
      onEvent: (event) => this.over || this.take(event),
      onClose: (close) => this.over || this.closed(close),
    });
  }

  /** End it now: nothing more is heard or spoken. */
  stop() {
    this.connection?.send({ type: "session.cancel" });
    if (!this.running) this.connection?.close();
    this.end("ready", "Stopped. Press Talk to begin another conversation.");
  }

  /** End the assistant's turn: what waits is not spoken, and the model is told. */
  interrupt() {
    this.cut("response.interrupt");
  }

  /** Begin the person's turn, which ends the assistant's, or end it. */
  changeTurn() {
    this.yourTurn = !this.yourTurn;
    if (this.yourTurn) this.cut("turn.begin");
    else this.connection.send({ type: "turn.end" });
    this.sayTurn();
  }

  /** Play nothing until the server has seen this message: it answers with response.interrupted. */
  cut(type) {
    this.audio.clear();
    this.discarding = true;
    this.connection.send({ type });
  }

  // -- from the microphone

  hear({ frame, peak: level, heard }) {
    if (!this.running) return;
    const { muted, halfDuplex } = this.switches;
    const off = muted || (halfDuplex && this.speaking) || (this.settings.pushToTalk && !this.yourTurn);
    this.checkSound(heard);
    this.checkLag(this.timing.lagSeconds);
    const loudness = off ? 0 : level;
    this.sinceLoud = loudness > LOUD_PEAK ? 0 : this.sinceLoud + 1;
    const pcm = off ? new Int16Array(INPUT_FRAME_SAMPLES) : toPcm(frame);
    this.recording.heard(pcm);
    this.timing.sent(performance.now() / 1000);
    this.connection.send(append(pcm));
    this.view.level(loudness);
    this.view.figures(this);
  }

  checkSound(level) {
    this.silentFrames = level > 0 ? 0 : this.silentFrames + 1;
    if (level > 0) this.unremark("silence");
    if (this.silentFrames === SILENT_FRAMES) this.remark("silence", NO_SOUND);
  }

  checkLag(seconds) {
    if (seconds > BEHIND_SECONDS) this.remark("lag", BEHIND);
    if (seconds < BEHIND_SECONDS / 2) this.unremark("lag");
  }

  report(report) {
    this.buffer = report;
    if (!this.running || report.speaking === this.speaking) return;
    this.speaking = report.speaking;
    this.sayTurn();
  }

  // -- from the server

  take(event) {
    if (event.type === "session.updated") this.begin(event.session);
    else if (event.type === "response.audio.delta") this.speak(event);
    else if (event.type === "response.interrupted") this.resume(event.frame_index);
    else if (event.type === "session.lagging") this.checkLag(event.backlog_seconds);
    else if (event.type === "error") this.fail(event.error);
    const turn = this.captions.take(event);
    if (turn) this.view.turn(turn);
  }

  begin({ model }) {
    this.model = model;
    this.started = new Date();
    this.running = true;
    this.view.begun();
    this.sayTurn();
  }

  speak({ frame_index: index, delta }) {
    const pcm = fromBase64(delta);
    this.recording.spoken(index, pcm);
    this.timing.answered(performance.now() / 1000);
    if (this.discarding || index < this.playFrom) return;
    const samples = toFloat(pcm);
    this.quietFrames = peak(samples) < QUIET_PEAK ? this.quietFrames + 1 : 0;
    if (this.quietFrames === YIELD_FRAMES && this.sinceLoud < BREATH_FRAMES) this.audio.clear();
    else this.audio.play(samples);
  }

  resume(frameIndex) {
    this.discarding = false;
    this.playFrom = frameIndex;
  }

  /** An error of the model ends the conversation: the server keeps the socket, but there is nothing more to come. */
  fail(error) {
    this.discarding = false;
    if (error.code !== "inference_error") return;
    const [state, words] = ended({ error });
    this.connection.send({ type: "session.cancel" });
    this.end(state, words);
  }

  closed(close) {
    if (close.opened) this.end(...ended(close));
    else this.refused();
  }

  /** Find out why there is no connection; a server that loads is waited for. */
  async refused() {
    const state = await health();
    if (this.over) return;
    if (state === "loading" || state === "warming") {
      this.say("loading");
      setTimeout(() => this.over || this.connect(), POLL_MS);
      return;
    }
    const status = state === "unreachable" ? 0 : await plainStatus(this.key);
    if (this.over) return;
    this.end("lost", refused({ health: state, status, key: this.key, origin: location.origin }));
    if (status === 401) this.view.askForKey();
  }

  // -- to the person

  /** A notice, said once: it is read aloud. */
  remark(about, words) {
    if (this.remarked === about) return;
    this.remarked = about;
    this.view.notice(words);
  }

  unremark(about) {
    if (this.remarked === about) this.remark(null, "");
  }

  /** Whose turn it is, as the switches have it: call it when one of them has changed. */
  sayTurn() {
    if (!this.running) return;
    const { muted, halfDuplex } = this.switches;
    const { pushToTalk } = this.settings;
    if (this.yourTurn) this.say("listening", muted ? MUTED : YOUR_TURN);
    else if (this.speaking) this.say("speaking", halfDuplex && !muted && !pushToTalk ? HALF_DUPLEX : undefined);
    else if (pushToTalk) this.say("waiting");
    else this.say("listening", muted ? MUTED : undefined);
  }

  say(state, words = STATES[state][1]) {
    this.view.state(state, words);
  }

  end(state, words) {
    this.over = true;
    this.running = false;
    this.audio?.close();
    this.view.level(0);
    this.say(state, words);
    this.view.ended();
  }
}
