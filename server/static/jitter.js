// Frames come when the network brings them, samples leave when the audio clock asks. No browser needed.

const LEAST_FRAMES = 2;
const MOST_FRAMES = 4;
const CALM_SECONDS = 10; // without starving, after which a frame less will do
const QUIET_PEAK = 0.005; // -46 dB: a frame below it can be left out unheard
const BRIDGE_SECONDS = 0.01; // what is left of such a frame, so that its ends meet without a step
const FADE_SECONDS = 0.003; // into and out of an unplanned silence

/**
 * Holds `target` frames (2 to 4) before it begins. Starved, it waits for one more than before; after a calm while it
 * gives that back. What it holds above the target goes when the speech pauses: no word is cut.
 */
export class JitterBuffer {
  constructor(rateHz, frameSeconds = 0.08) {
    this.rateHz = rateHz;
    this.frameSamples = rateHz * frameSeconds;
    this.target = LEAST_FRAMES;
    this.starved = 0; // times, in all
    this.calmSamples = 0;
    this.last = 0; // sample that was played: it dies away
    this.clear();
  }

  /** Drop what waits and begin anew, at the same target. */
  clear() {
    this.chunks = [];
    this.offset = 0; // into the first chunk
    this.samples = 0; // that wait
    this.filling = true;
    this.gain = 0; // of the fade in
  }

  get seconds() {
    return this.samples / this.rateHz;
  }

  push(samples) {
    const excess = this.samples >= (this.target + 1) * this.frameSamples;
    const omitted = excess && peak(samples) < QUIET_PEAK;
    const chunk = omitted ? bridge(samples, Math.round(BRIDGE_SECONDS * this.rateHz)) : samples;
    if (chunk.length === 0) return;
    this.chunks.push(chunk);
    this.samples += chunk.length;
  }

  /** Fill `output`: what waits, or silence while there is not enough. */
  pull(output) {
    // A resampler before this buffer keeps an edge of the last frame: half a frame less counts as whole.
    if (this.samples >= (this.target - 0.5) * this.frameSamples) this.filling = false;
    const step = 1 / (FADE_SECONDS * this.rateHz);
    let done = 0;
    while (!this.filling && done < output.length) {
      if (this.chunks.length === 0) {
        this.starve();
        break;
      }
      const chunk = this.chunks[0];
      const count = Math.min(output.length - done, chunk.length - this.offset);
      for (let index = 0; index < count; index++) {
        this.gain = Math.min(1, this.gain + step);
        output[done + index] = chunk[this.offset + index] * this.gain;
      }
      done += count;
      this.offset += count;
      this.samples -= count;
      this.calmSamples += count;
      if (this.offset === chunk.length) {
        this.chunks.shift();
        this.offset = 0;
      }
    }
    if (done > 0) this.last = output[done - 1];
    this.fadeOut(output, done);
    if (this.calmSamples > CALM_SECONDS * this.rateHz) {
      this.calmSamples = 0;
      this.target = Math.max(LEAST_FRAMES, this.target - 1);
    }
  }

  starve() {
    this.starved += 1;
    this.target = Math.min(MOST_FRAMES, this.target + 1);
    this.calmSamples = 0;
    this.filling = true;
    this.gain = 0;
  }

  /** The rest of `output` from `done` on: what was played dies away, where a step would click. */
  fadeOut(output, done) {
    const decay = Math.exp(-3 / (FADE_SECONDS * this.rateHz));
    for (let index = done; index < output.length; index++) {
      this.last = Math.abs(this.last) < 1e-5 ? 0 : this.last * decay;
      output[index] = this.last;
    }
  }
}

/** The largest absolute sample. */
export function peak(samples) {
  let most = 0;
  for (const sample of samples) most = Math.max(most, Math.abs(sample));
  return most;
}

/** The frame shortened to `length` samples: from its first into its last, without a step at either end. */
function bridge(samples, length) {
  if (samples.length <= length) return samples;
  const end = samples.subarray(samples.length - length);
  return Float32Array.from({ length }, (_, index) => {
    const weight = index / (length - 1);
    return samples[index] * (1 - weight) + end[index] * weight;
  });
}
