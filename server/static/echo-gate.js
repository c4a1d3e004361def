// What is left of the assistant's own voice after the browser's echo canceller is not sent. No browser needed.

export const BLOCK_SECONDS = 0.01;
const WINDOW_BLOCKS = 8; // of a level: over less, peaks of the remains would pass
const HANG_MS = 240; // after the far side, in which the room still sounds
const SOUNDING_DBFS = -50; // a far side below it is not heard in the room
const START_DBFS = -40; // of the threshold
const LEAST_DBFS = -46;
const MOST_DBFS = -30;
const MARGIN_DB = 6; // of the threshold over the remains
const TAKEN_DB = 12; // that the near side is below the far side where little but the remains is heard
const RISE_DB = 0.04; // of the threshold in a block: it settles over the loudest fifth of the remains
const FALL_DB = 0.01;
const BEGINNING_BLOCKS = 100; // of a far side that begins: cancellers leave bursts of it
const PAUSE_BLOCKS = 10; // before it
const STEADY_BLOCKS = 6; // of the 80 ms that must be loud then: no burst, somebody speaks
const STEADY_DB = 3; // how far under the threshold they may be

/** What is played, between the playback, which adds, and the capture, which takes. */
export class FarSide {
  constructor() {
    this.sum = 0;
    this.count = 0;
  }

  add(samples) {
    for (const sample of samples) this.sum += sample * sample;
    this.count += samples.length;
  }

  /** The mean energy since the last call; null if nothing was added. */
  take() {
    const energy = this.count > 0 ? this.sum / this.count : null;
    this.sum = 0;
    this.count = 0;
    return energy;
  }
}

/** The audio thread's own: its modules share this one. */
export const farSide = new FarSide();

/**
 * The gate of mlx_voicechat/sound/echo_gate.py. The browser does not tell what its canceller took, so the remains are
 * seen where the near side is far below what is played.
 */
export class EchoGate {
  constructor(delayMs = 0) {
    this.hangBlocks = Math.floor((HANG_MS + delayMs) / 10);
    this.sinceFar = this.hangBlocks;
    this.farBlocks = 0; // since it began
    this.far = new Window();
    this.left = new Window();
    this.thresholdDbfs = START_DBFS;
  }

  /** Energies of 10 ms of what is played and of what is left of the microphone: whether the latter is sent. */
  passes(far, left) {
    this.sinceFar = dbfs(far) > SOUNDING_DBFS ? 0 : this.sinceFar + 1;
    this.farBlocks = this.sinceFar > PAUSE_BLOCKS ? 0 : this.farBlocks + 1;
    const played = this.far.level(far);
    const level = this.left.level(left);
    if (this.sinceFar > this.hangBlocks) return true;
    if (this.sinceFar === 0 && played - level >= TAKEN_DB) {
      const step = level + MARGIN_DB > this.thresholdDbfs ? RISE_DB : -FALL_DB;
      this.thresholdDbfs = Math.min(MOST_DBFS, Math.max(LEAST_DBFS, this.thresholdDbfs + step));
    }
    const steady = this.left.above(this.thresholdDbfs - STEADY_DB) >= STEADY_BLOCKS;
    return level >= this.thresholdDbfs && (steady || this.farBlocks > BEGINNING_BLOCKS);
  }
}

class Window {
  constructor() {
    this.energies = new Float64Array(WINDOW_BLOCKS);
    this.at = 0;
  }

  /** The level over 80 ms, with this block the last. */
  level(energy) {
    this.energies[this.at] = energy;
    this.at = (this.at + 1) % WINDOW_BLOCKS;
    return dbfs(this.energies.reduce((sum, part) => sum + part, 0) / WINDOW_BLOCKS);
  }

  /** How many of its blocks are louder. */
  above(levelDbfs) {
    return this.energies.filter((energy) => dbfs(energy) > levelDbfs).length;
  }
}

/** The mean energy of samples. */
export function energyOf(samples) {
  return samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length;
}

function dbfs(energy) {
  return 10 * Math.log10(energy + 1e-12);
}
