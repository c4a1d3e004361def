// A stateful windowed-sinc resampler: polyphase, for any two whole rates. No browser needed.

const ZERO_CROSSINGS = 24; // of the sinc on each side, at the lower of the two rates
const ROLLOFF = 0.9; // of the lower rate's band that passes; the rest is the filter's slope
const KAISER_BETA = 8; // about 80 dB

/** Float32 samples of one rate in, of another out; blocks of any size give what one block of all would give. */
export class Resampler {
  constructor(fromHz, toHz) {
    const divisor = greatestCommonDivisor(fromHz, toHz);
    this.fromHz = fromHz;
    this.toHz = toHz;
    this.up = toHz / divisor;
    this.down = fromHz / divisor;
    const scale = ROLLOFF * Math.min(1, toHz / fromHz);
    this.half = Math.ceil(ZERO_CROSSINGS / scale);
    this.phases = Array.from({ length: this.up }, (_, phase) => taps(phase / this.up, this.half, scale));
    this.reset();
  }

  /** Forget what was heard: the next sample is the first. */
  reset() {
    this.waiting = new Float32Array(this.half - 1); // silence before the first sample
    this.phase = 0; // of the next output, in 1/up of an input sample after waiting[half - 1]
    this.received = 0;
    this.given = 0;
  }

  /** Samples that can be computed now: all but those that need the input to come. */
  push(samples) {
    const { up, down, half, phases } = this;
    const input = new Float32Array(this.waiting.length + samples.length);
    input.set(this.waiting);
    input.set(samples, this.waiting.length);
    this.received += samples.length;
    const last = input.length - 2 * half; // the last start with all its taps
    const count = last < 0 ? 0 : Math.max(0, Math.ceil(((last + 1) * up - this.phase) / down));
    const output = new Float32Array(count);
    let start = 0;
    let phase = this.phase;
    for (let index = 0; index < count; index++) {
      const weights = phases[phase];
      let sum = 0;
      for (let tap = 0; tap < weights.length; tap++) sum += weights[tap] * input[start + tap];
      output[index] = sum;
      phase += down;
      const whole = Math.floor(phase / up);
      start += whole;
      phase -= whole * up;
    }
    this.waiting = input.slice(start);
    this.phase = phase;
    this.given += count;
    return output;
  }

  /** The end: what is left, so that in all round(received * to / from) samples were given; then as new. */
  flush() {
    const left = Math.round((this.received * this.toHz) / this.fromHz) - this.given;
    const output = this.push(new Float32Array(2 * this.half)).slice(0, Math.max(0, left));
    this.reset();
    return output;
  }
}

/** 2 * half weights for an output that lies `offset` (0 to 1) after input sample half - 1; their sum is 1. */
function taps(offset, half, scale) {
  const weights = Float64Array.from({ length: 2 * half }, (_, tap) => {
    const distance = tap - (half - 1) - offset;
    return sinc(scale * distance) * kaiser(distance / half);
  });
  const sum = weights.reduce((total, weight) => total + weight, 0);
  return weights.map((weight) => weight / sum);
}

function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}

function kaiser(x) {
  return Math.abs(x) >= 1 ? 0 : bessel(KAISER_BETA * Math.sqrt(1 - x * x)) / bessel(KAISER_BETA);
}

/** The modified Bessel function of the first kind, order 0, by its series. */
function bessel(x) {
  let sum = 1;
  for (let term = 1, k = 1; term > sum * 1e-12; k++) {
    term *= (x / (2 * k)) ** 2;
    sum += term;
  }
  return sum;
}

function greatestCommonDivisor(a, b) {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}
