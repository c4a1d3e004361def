// On the audio thread: the assistant's frames -> the loudspeaker, on the audio clock, through the jitter buffer.

import { farSide } from "./echo-gate.js";
import { JitterBuffer, peak } from "./jitter.js";
import { Resampler } from "./resampler.js";

const REPORT_SECONDS = 0.05;
const SPEAKING_PEAK = 0.01;
const HANG_SECONDS = 0.3; // a pause between words is still speaking

class Playback extends AudioWorkletProcessor {
  constructor({ processorOptions: { rateHz } }) {
    super();
    this.resampler = new Resampler(rateHz, sampleRate);
    this.buffer = new JitterBuffer(sampleRate);
    this.quietSamples = Infinity;
    this.sinceReport = 0;
    this.port.onmessage = ({ data }) => this.take(data);
  }

  /** A frame to play, or null: be silent at once. */
  take(frame) {
    if (frame === null) {
      this.resampler.reset();
      this.buffer.clear();
    } else {
      this.buffer.push(this.resampler.push(frame));
    }
  }

  process(_, [[output]]) {
    this.buffer.pull(output);
    farSide.add(output);
    this.quietSamples = peak(output) > SPEAKING_PEAK ? 0 : this.quietSamples + output.length;
    this.sinceReport += output.length;
    if (this.sinceReport >= REPORT_SECONDS * sampleRate) this.report();
    return true;
  }

  report() {
    this.sinceReport = 0;
    const { seconds, target, starved } = this.buffer;
    this.port.postMessage({ speaking: this.quietSamples < HANG_SECONDS * sampleRate, seconds, target, starved });
  }
}

registerProcessor("playback", Playback);
