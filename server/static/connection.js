// One WebSocket to /v1/realtime, and what plain requests tell about the server.

import { isUnderstood, sessionUpdate, subprotocols } from "./protocol.js";

const PATIENCE_MS = 5000;
const OTHER_FORMAT = "the server hears or speaks a format that this page does not.";

/** Calls `onEvent(event)` for each of the server's, at the end `onClose({ opened, code, reason, error, finished })`. */
export class Connection {
  constructor({ key, settings, onEvent, onClose }) {
    this.settings = settings;
    this.onEvent = onEvent;
    this.opened = false;
    this.finished = false;
    this.error = null; // the last one that the server told
    this.socket = new WebSocket(address("v1/realtime").replace(/^http/, "ws"), subprotocols(key));
    this.socket.onopen = () => (this.opened = true);
    this.socket.onmessage = ({ data }) => this.take(JSON.parse(data));
    this.gone = new Promise((resolve) => {
      this.socket.onclose = ({ code, reason }) => {
        const { opened, error, finished } = this;
        resolve();
        onClose({ opened, code, reason, error, finished });
      };
    });
  }

  take(event) {
    if (event.type === "session.created") this.greet(event.session);
    if (event.type === "error") this.error = event.error;
    if (event.type === "response.done" || event.type === "response.cancelled") this.finished = true;
    if (event.type === "error" && event.error.code === "session_initialization_failed") this.close();
    this.onEvent(event);
  }

  greet(session) {
    if (isUnderstood(session)) {
      this.send(sessionUpdate(this.settings));
    } else {
      this.error = { code: "session_initialization_failed", message: OTHER_FORMAT };
      this.close();
    }
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  close() {
    this.socket.close();
  }
}

/** What /health says: "loading", "warming", "ready", "busy"; "unreachable" when nobody answers. */
export async function health() {
  try {
    return (await (await get("health")).json()).status;
  } catch {
    return "unreachable";
  }
}

/** The HTTP status of a plain request for the WebSocket's address: 426 if only the upgrade was missing. */
export async function plainStatus(key) {
  try {
    return (await get("v1/realtime", key ? { Authorization: `Bearer ${key}` } : {})).status;
  } catch {
    return 0;
  }
}

function get(path, headers = {}) {
  return fetch(address(path), { cache: "no-store", headers, signal: AbortSignal.timeout(PATIENCE_MS) });
}

function address(path) {
  return new URL(path, document.baseURI).href;
}
