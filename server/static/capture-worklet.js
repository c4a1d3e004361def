// On the audio thread: the microphone at the device's rate -> frames for the model, each sent to the page when full.

import { BLOCK_SECONDS, EchoGate, energyOf, farSide } from "./echo-gate.js";
import { peak } from "./jitter.js";
import { Resampler } from "./resampler.js";

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions: { rateHz, frameSamples, delayMs } }) {
    super();
    this.resampler = new Resampler(sampleRate, rateHz);
    this.gate = new EchoGate(delayMs);
    this.block = new Float32Array(rateHz * BLOCK_SECONDS);
    this.inBlock = 0;
    this.far = 0; // energy of what was played last
    this.frame = new Float32Array(frameSamples); // whole blocks
    this.filled = 0;
    this.heard = 0; // peak of the frame before the gate
  }

  process([channels]) {
    for (const sample of this.resampler.push(mono(channels))) {
      this.block[this.inBlock++] = sample;
      if (this.inBlock === this.block.length) this.take();
    }
    return true;
  }

  /** A block is full. */
  take() {
    this.inBlock = 0;
    this.far = farSide.take() ?? this.far;
    this.heard = Math.max(this.heard, peak(this.block));
    if (this.gate.passes(this.far, energyOf(this.block))) this.frame.set(this.block, this.filled);
    else this.frame.fill(0, this.filled, this.filled + this.block.length);
    this.filled += this.block.length;
    if (this.filled === this.frame.length) this.send();
  }

  send() {
    const frame = this.frame.slice();
    this.port.postMessage({ frame, peak: peak(frame), heard: this.heard }, [frame.buffer]);
    this.filled = 0;
    this.heard = 0;
  }
}

/** The mean of the channels; a microphone that is gone is a block of silence, so that the timeline goes on. */
function mono(channels) {
  if (channels.length === 0) return new Float32Array(128);
  if (channels.length === 1) return channels[0];
  return channels[0].map((_, index) => channels.reduce((sum, channel) => sum + channel[index], 0) / channels.length);
}

registerProcessor("capture", Capture);
