// On the audio thread: the microphone at the device's rate -> frames for the model, each sent to the page when full.

import { peak } from "./jitter.js";
import { Resampler } from "./resampler.js";

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions: { rateHz, frameSamples } }) {
    super();
    this.resampler = new Resampler(sampleRate, rateHz);
    this.frame = new Float32Array(frameSamples);
    this.filled = 0;
  }

  process([channels]) {
    for (const sample of this.resampler.push(mono(channels))) {
      this.frame[this.filled++] = sample;
      if (this.filled === this.frame.length) this.send();
    }
    return true;
  }

  send() {
    const frame = this.frame.slice();
    this.filled = 0;
    this.port.postMessage({ frame, peak: peak(frame) }, [frame.buffer]);
  }
}

/** The mean of the channels; a microphone that is gone is a block of silence, so that the timeline goes on. */
function mono(channels) {
  if (channels.length === 0) return new Float32Array(128);
  if (channels.length === 1) return channels[0];
  return channels[0].map((_, index) => channels.reduce((sum, channel) => sum + channel[index], 0) / channels.length);
}

registerProcessor("capture", Capture);
