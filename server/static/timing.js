// How fast the server is, seen from here. No browser needed.

import { FRAME_SECONDS } from "./protocol.js";

const FRAMES = 25; // two seconds

/** Times are seconds of one clock. The server answers every frame of audio with one of its own. */
export class Timing {
  constructor() {
    this.sentAt = []; // of frames that are not yet answered
    this.services = [];
    this.answeredAt = -Infinity;
  }

  sent(now) {
    this.sentAt.push(now);
  }

  /** A frame was answered. It was worked on from when it was sent, or from the answer before it, whichever is later. */
  answered(now) {
    if (this.sentAt.length === 0) return;
    this.services.push(now - Math.max(this.sentAt.shift(), this.answeredAt));
    this.answeredAt = now;
    if (this.services.length > FRAMES) this.services.shift();
  }

  /** A frame's mean time over its length, of late; above 1 the server falls behind. Null while unknown. */
  get realtimeFactor() {
    if (this.services.length < FRAMES / 5) return null;
    const sum = this.services.reduce((total, service) => total + service, 0);
    return sum / this.services.length / FRAME_SECONDS;
  }

  /** Seconds of audio that were sent and are not answered. */
  get lagSeconds() {
    return this.sentAt.length * FRAME_SECONDS;
  }
}
