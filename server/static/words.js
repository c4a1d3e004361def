// What the page says: every state, how a conversation ends, why there is no microphone. No browser needed.

export const STATES = {
  connecting: ["Connecting", "Looking for the server."],
  loading: ["Loading", "The server is loading its model. The page goes on when it is ready."],
  ready: ["Ready", "Press Talk and say something."],
  listening: ["Listening", "Speak when you like, also while the assistant does."],
  speaking: ["Speaking", "The assistant is speaking."],
  waiting: ["Waiting", "Press Start speaking, or the space bar, when you want to say something."],
  busy: ["Busy", "Somebody is talking with the model. Try again when they have finished."],
  lost: ["Lost", ""],
  microphone: ["No microphone", ""],
};

export const YOUR_TURN = "Speak, and press Done when you have finished.";
export const MUTED = "You are muted: the assistant hears silence.";
export const HALF_DUPLEX = "The assistant is speaking; your microphone is off meanwhile.";
export const NO_SERVER = "No server answers. Start it with “mlx-voicechat serve”, then press Talk.";
export const MICROPHONE_GONE = "The microphone is gone: what you say is not heard. Stop, connect it, and press Talk.";
export const BEHIND =
  "The server is more than a second behind (the figure is Lag): its machine is slower than real time, or shared. " +
  "A smaller checkpoint may fit.";
export const WRONG_KEY = "A browser can send only letters, digits and !#$%&'*+-.^_`|~ in a key.";
export const NO_SOUND =
  "The microphone gives only silence. Is it muted, or not allowed for this browser? " +
  "(macOS: System Settings, Privacy & Security, Microphone.)";
const TOO_SLOW =
  "This page did not take the speech fast enough, so the server ended the conversation. " +
  "Close other pages, or come nearer to the server.";
const NOT_ALLOWED =
  "The browser was not allowed to use the microphone. Allow it for this page (the sign beside the address), " +
  "and for the browser in the system’s settings; then press Talk.";

/** How a conversation that had begun ended: [state, words]. `error` is the server's last error event, if any. */
export function ended({ code, reason, error, finished }) {
  if (error?.code === "server_busy" || code === 1013) return ["busy", STATES.busy[1]];
  if (error?.code === "slow_consumer") return ["lost", TOO_SLOW];
  if (error?.code === "session_initialization_failed") {
    return ["lost", `The conversation did not begin: ${error.message}`];
  }
  if (error?.code === "inference_error") return ["lost", `The server ended the conversation: ${error.message}`];
  if (finished) return ["ready", "The conversation has ended. Press Talk to begin another."];
  if (code === 1001) return ["lost", "The server is shutting down. Start it again, then press Talk."];
  if (code === 1006) {
    return ["lost", "The connection broke: the server was ended or the network is gone. Press Talk to try again."];
  }
  const why = error?.message || reason;
  if (code === 1008) return ["lost", `The server ended the conversation: ${why || "a limit was reached."}`];
  return ["lost", `The server closed the connection (code ${code})${why ? `: ${why}` : "."}`];
}

/** Why no connection was opened: `health` as the server tells it, `status` of a plain request for the same address. */
export function refused({ health, status, key, origin }) {
  if (health === "unreachable") return NO_SERVER;
  if (status === 401 && key) return "The server does not accept this API key.";
  if (status === 401) return "The server asks for an API key: enter it in the settings.";
  if (status === 426) {
    return `The server refuses pages from this address. Start it with --allowed-origins ${origin}`;
  }
  return `The server does not open a conversation (HTTP ${status}).`;
}

/** Why there is no microphone, from the name of getUserMedia's error. */
export function microphone(name) {
  if (name === "NotAllowedError") return NOT_ALLOWED;
  if (name === "NotFoundError") return "No microphone was found. Connect one, then press Talk.";
  if (name === "NotReadableError") return "The microphone cannot be opened: another program may be using it.";
  return `The microphone cannot be opened (${name}).`;
}

/** What to do about a page that browsers give no microphone. */
export function insecure({ hostname, port }) {
  const at = port ? `:${port}` : "";
  return (
    "Browsers give a page the microphone only over https, or on the machine itself. " +
    `On that machine, open http://localhost${at}/. From another machine or a phone, ` +
    `start the server with --ssl-certfile and --ssl-keyfile, and open https://${hostname}${at}/.`
  );
}
