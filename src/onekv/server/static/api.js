// The server: JSON, streams, its errors, its key.

import { ask, h, labelled } from "./dom.js";

const KEY = "onekv.key";

/** What the server refused, in its own words, or that it did not answer (status 0). */
export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const get = async (path) => (await request("GET", path)).json();
export const post = async (path, body = {}) => (await request("POST", path, body)).json();
export const remove = async (path) => void (await request("DELETE", path));

/** The chunks of a streamed answer. Throws ApiError, also when the stream breaks off; AbortError when `signal` ended it. */
export async function* stream(path, body, signal) {
  const response = await request("POST", path, body, signal);
  for await (const { event, data } of events(response.body.pipeThrough(new TextDecoderStream()))) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (event === "error" || chunk.error) throw new ApiError(chunk.error.message, response.status, chunk.error.code);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

/** Server-sent events; they may be cut anywhere. */
async function* events(chunks) {
  const reader = chunks.getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (buffer + value).split("\n\n");
      buffer = whole.pop();
      for (const block of whole) {
        const fields = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          const [name] = line.split(":", 1);
          if (name in fields) fields[name] = line.slice(name.length + 1).trimStart();
        }
        if (fields.data) yield fields;
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The connection ended before the answer did.");
  } finally {
    reader.cancel().catch(() => {}); // it has ended, or broke off
  }
}

async function request(method, path, body, signal) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      throw error.name === "AbortError" ? error : new ApiError("The server does not answer.");
    }
    if (response.ok) return response;
    const error = await refusal(response);
    // Another request may have got the key meanwhile.
    if (error.status !== 401 || (sessionStorage.getItem(KEY) === key && !(await newKey(key !== null)))) throw error;
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return new ApiError(message, response.status, code);
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}.`, response.status);
  }
}

let asking = null;

/** Ask for the key, once for all requests that wait for it. Whether one was given. */
function newKey(wasWrong) {
  asking ??= (async () => {
    const input = h("input", { name: "key", type: "password", required: true, autocomplete: "off", autofocus: true });
    const why = wasWrong ? "The server does not take this key." : "This server wants a key with every request.";
    const answer = await ask("API key", [h("p", {}, why, " It is kept until this tab is closed."), labelled("Key", input)], "Use it");
    if (answer) sessionStorage.setItem(KEY, answer.key);
    asking = null;
    return answer !== null;
  })();
  return asking;
}
