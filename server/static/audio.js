// The page's audio graph: microphone -> frames for the model, the assistant's frames -> loudspeaker.

import { INPUT_FRAME_SAMPLES, INPUT_RATE_HZ, OUTPUT_RATE_HZ } from "./protocol.js";

/** What `Audio.open` rejects with when the server does not give the page's own files. */
export class NoFiles extends Error {}

/**
 * Handlers: `onFrame({ frame, peak, heard })` with every 80 ms: what is to be sent, its peak, and the peak of all that
 * was heard; `onReport({ speaking, seconds, target, starved })` often; `onMicrophoneGone()` when it is unplugged.
 */
export class Audio {
  /** Call it from a click, or the browser keeps the sound off. Rejects as getUserMedia does. */
  static async open(handlers) {
    const audio = new Audio();
    try {
      await audio.start(handlers);
    } catch (fault) {
      audio.close();
      throw fault;
    }
    return audio;
  }

  constructor() {
    this.context = new AudioContext({ latencyHint: "interactive" });
    this.context.resume();
  }

  async start({ onFrame, onReport, onMicrophoneGone }) {
    const wanted = { audio: { echoCancellation: true, channelCount: 1 } };
    this.stream = await navigator.mediaDevices.getUserMedia(wanted);
    this.stream.getAudioTracks()[0].onended = onMicrophoneGone;
    const { context } = this;
    await Promise.all(["capture-worklet.js", "playback-worklet.js"].map((name) => addModule(context, name)));
    const delayMs = Math.round(1000 * (context.baseLatency + (context.outputLatency || 0)));
    const capture = this.node("capture", { rateHz: INPUT_RATE_HZ, frameSamples: INPUT_FRAME_SAMPLES, delayMs }, 1);
    capture.port.onmessage = ({ data }) => onFrame(data);
    this.playback = this.node("playback", { rateHz: OUTPUT_RATE_HZ }, 0);
    this.playback.port.onmessage = ({ data }) => onReport(data);
    context.createMediaStreamSource(this.stream).connect(capture);
  }

  /** A node that is connected to the loudspeaker: what is connected to nothing does not run everywhere. */
  node(name, processorOptions, numberOfInputs) {
    const options = { numberOfInputs, outputChannelCount: [1], processorOptions };
    const node = new AudioWorkletNode(this.context, name, options);
    node.connect(this.context.destination);
    return node;
  }

  /** Play float samples (S,) at 22.05 kHz after what waits. */
  play(samples) {
    this.playback.port.postMessage(samples, [samples.buffer]);
  }

  /** Be silent at once. */
  clear() {
    this.playback?.port.postMessage(null);
  }

  close() {
    this.clear();
    this.stream?.getTracks().forEach((track) => track.stop());
    if (this.context.state !== "closed") this.context.close();
  }
}

async function addModule(context, name) {
  try {
    await context.audioWorklet.addModule(new URL(name, import.meta.url));
  } catch (fault) {
    throw new NoFiles(name, { cause: fault });
  }
}
