// One conversation: a column of the page, a session of the server.

import { get, post, stream } from "./api.js";
import { ask, bytes, count, h, quoted } from "./dom.js";

// Why no more of a prompt was cached: where it parts from what the buffer held.
const WHY = {
  all: () => "All of the prompt was in the buffer; its last token is always evaluated, to know what follows.",
  differs: (why) => `At position ${why.position} the buffer goes on with ${quoted(why.cached_text)}, the prompt with ${quoted(why.given_text)}.`,
  evicted: (why) => `What comes from position ${why.position} on had been in the buffer, and was evicted to make room.`,
  never: (why) => `What comes from position ${why.position} on had not been evaluated before.`,
};

/** A message the server does not have, or not yet. */
function bubble(role, content, kind = role) {
  return h("article", { class: `message ${kind}` }, h("span", { class: "role" }, role), h("p", { class: "content" }, content));
}

export class Conversation {
  #running = null; // AbortController of the answer that is being made
  #follows = true; // the end of the messages is in view, and is to stay there
  #drawn = ""; // the messages that are shown, to leave them alone when they are the same

  /** `page`: what a column needs of the rest: opened(session, after), nextName(name), closed(id), deleted(session), light(session, message | null), settings. */
  constructor(session, hue, page) {
    this.session = session;
    this.hue = hue;
    this.page = page;
    this.part = this.#parts();
    this.element = h(
      "section",
      { class: "column", "aria-labelledby": `name-${session.id}`, onkeydown: (event) => this.#key(event) },
      h("header", {}, h("div", { class: "row" }, h("i", { class: `swatch hue-${hue}` }), this.part.name), this.part.state, this.part.tools),
      this.part.instructions,
      this.part.messages,
      this.part.last,
      this.part.alert,
      this.part.form,
    );
    this.update(session);
  }

  get id() {
    return this.session.id;
  }

  #parts() {
    const button = (text, onclick, attributes = {}) => h("button", { type: "button", class: "quiet small", onclick, ...attributes }, text);
    const name = h("h2", { id: `name-${this.session.id}` });
    const tools = {
      fork: button("Fork", () => this.fork({}), { title: "A new conversation with the same messages, in the same cells" }),
      save: button("Save", () => this.save(), { title: "Write its keys and values to the server's disk" }),
      restore: button("Restore", () => this.restore(), { title: "Back to what was saved" }),
      close: button("Close", () => this.page.closed(this.id), { title: "Take it off this page; the server keeps it" }),
      delete: button("Delete", () => this.page.deleted(this.session), { title: "Memory and disk" }),
    };
    const input = h("textarea", { rows: 1, placeholder: "Message", "aria-label": "Message", oninput: () => this.#grow() });
    const system = h("textarea", { rows: 2, "aria-label": "Instructions", placeholder: "What the model is told first, such as how to answer" });
    const send = h("button", { type: "submit", class: "primary" }, "Send");
    const stop = h("button", { type: "button", hidden: true, onclick: () => this.stop() }, "Stop");
    const messages = h("div", { class: "messages", role: "log", "aria-live": "polite", "aria-busy": "false", "aria-label": "Messages", tabindex: 0 });
    messages.addEventListener("scroll", () => (this.#follows = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60));
    new ResizeObserver(() => this.#follow()).observe(messages);
    const submitted = (event) => {
      event.preventDefault();
      this.send();
    };
    return {
      name,
      ...tools,
      state: h("p", { class: "faint small state" }),
      tools: h("div", { class: "row tools" }, Object.values(tools)),
      instructions: h("details", { class: "instructions" }, h("summary", {}, "Instructions"), system),
      system,
      messages,
      last: h("div", { class: "last small" }),
      alert: h("div", {}),
      form: h("form", { class: "composer", onsubmit: submitted }, input, stop, send),
      input,
      send,
      stop,
    };
  }

  // --- what is shown ------------------------------------------------------------------------------------------------------------

  /** Show what the server's list says of it; undefined: the server has it no more. */
  update(session) {
    const { part } = this;
    if (!session) {
      if (!part.send.disabled) this.fail("The server does not have this conversation any more.");
      for (const control of [part.send, part.fork, part.save, part.restore, part.delete]) control.disabled = true;
      return;
    }
    this.session = { ...this.session, ...session };
    const { name, tokens, cells, bytes: size, exact, state, saved } = this.session;
    part.name.textContent = name || "Untitled";
    const notes = [count(tokens, "token"), count(cells, "cell"), bytes(size)];
    if (!exact) notes.push("approximate after a shift");
    if (state === "evicted") notes.push("evicted, evaluated again when it goes on");
    if (state === "saved") notes.push("on disk only");
    else if (saved) notes.push("saved");
    const text = notes.join(" · ");
    if (part.state.textContent !== text) part.state.textContent = text;
    part.save.disabled = state === "saved";
  }

  /** Fetch the session and its messages. */
  async load() {
    const session = await get(`v1/sessions/${this.id}`);
    this.update(session);
    const text = JSON.stringify(session.messages);
    if (text !== this.#drawn) {
      this.#drawn = text;
      this.part.messages.replaceChildren(...session.messages.map((message) => this.#message(message)));
      this.#follow();
    }
    this.part.instructions.hidden = session.messages.length > 0;
  }

  #message(message) {
    const { index, role, content, start, end } = message;
    const calls = (message.tool_calls ?? []).map((call) => `${call.function.name}(${call.function.arguments})`);
    const where = `${role} message ${index + 1}`;
    const action = (text, title, onclick) => h("button", { type: "button", class: "quiet small", title, "aria-label": `${text}: ${where}`, onclick }, text);
    const light = () => this.page.light(this.session, message);
    const dark = () => this.page.light(this.session, null);
    return h(
      "article",
      { class: `message ${role}`, "aria-label": where, onpointerenter: light, onpointerleave: dark, onfocusin: light, onfocusout: dark },
      h(
        "div",
        { class: "row spread" },
        h("span", { class: "role" }, role),
        h(
          "span",
          { class: "row actions" },
          action("Fork", "A new conversation that has this message and those before it, in the same cells", () => this.fork({ message: index })),
          action("Rewind", "Take back this message and those after it", () => this.rewind(message)),
          action("Remove", "Take this message out and keep those after it", () => this.edit(message)),
        ),
      ),
      h("p", { class: "content" }, [content, ...calls].filter(Boolean).join("\n")),
      start !== null && end !== null && h("span", { class: "faint tiny" }, `${count(end - start, "token")}, positions ${start} to ${end - 1}`),
    );
  }

  fail(error) {
    const text = error.message ?? error;
    const close = h("button", { type: "button", class: "quiet small", onclick: () => this.part.alert.replaceChildren() }, "Dismiss");
    this.part.alert.replaceChildren(h("div", { class: "alert", role: "alert" }, h("p", {}, text.replaceAll(this.id, quoted(this.session.name))), close));
  }

  #note(text) {
    this.part.last.replaceChildren(h("p", { role: "status" }, text));
  }

  #grow() {
    const { input } = this.part;
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + 2}px`;
  }

  #follow() {
    if (this.#follows) this.part.messages.scrollTop = this.part.messages.scrollHeight;
  }

  #key(event) {
    if (event.key === "Escape" && this.#running) this.stop();
    if (event.target === this.part.input && event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    }
  }

  // --- an answer ----------------------------------------------------------------------------------------------------------------

  stop() {
    this.#running?.abort();
  }

  async send() {
    const { part } = this;
    const text = part.input.value.trim();
    if (!text || this.#running || part.send.disabled) return;
    const messages = [{ role: "user", content: text }];
    const system = part.system.value.trim();
    if (system && !part.instructions.hidden) messages.unshift({ role: "system", content: system });
    this.#running = new AbortController();
    part.input.value = "";
    this.#grow();
    part.alert.replaceChildren();
    part.last.replaceChildren();
    part.send.hidden = true;
    part.stop.hidden = false;
    part.instructions.hidden = true;
    part.messages.setAttribute("aria-busy", "true"); // read out when it is whole, not word by word
    const answer = document.createTextNode("");
    part.messages.append(...messages.map(({ role, content }) => bubble(role, content)), bubble("assistant", answer, "assistant streaming"));
    this.#follows = true;
    this.#follow();
    this.#drawn = "";
    let error = null;
    let end = null;
    try {
      end = await this.#listen(messages, answer);
    } catch (caught) {
      error = caught;
    }
    this.#running = null;
    part.send.hidden = false;
    part.stop.hidden = true;
    const before = this.session.messages?.length;
    try {
      await this.load();
    } catch (caught) {
      error ??= caught;
    }
    part.messages.setAttribute("aria-busy", "false");
    const isKept = (this.session.messages?.length ?? 0) > (before ?? 0);
    if (!isKept && !part.input.value) part.input.value = text; // nothing typed is lost
    this.#grow();
    if (error?.name === "AbortError") this.#stopped(answer.data, isKept);
    else if (error) this.fail(error);
    else this.#explain(end);
  }

  /** Write an answer down as it comes. What was said at its end. */
  async #listen(messages, answer) {
    const { temperature, limit } = this.page.settings;
    const body = { session: this.id, messages, stream: true, stream_options: { include_usage: true }, temperature };
    // No more than will fit after what is said: a text has at most as many tokens as bytes, and a message some more around it.
    const said = messages.reduce((bytes, { content }) => bytes + new TextEncoder().encode(content).length + 32, 0);
    if (limit) body.max_completion_tokens = Math.max(1, Math.min(limit, this.page.longest - this.session.tokens - said));
    const end = {};
    for await (const chunk of stream("v1/chat/completions?explain=1", body, this.#running.signal)) {
      const [choice] = chunk.choices;
      if (choice?.delta?.content) answer.appendData(choice.delta.content);
      if (choice?.finish_reason) end.reason = choice.finish_reason;
      if (chunk.usage) end.usage = chunk.usage;
      if (chunk.explain) end.explain = chunk.explain;
      this.#follow();
    }
    return end;
  }

  #stopped(text, isKept) {
    if (text && !isKept) this.part.messages.append(bubble("stopped, not kept", text, "assistant dropped"));
    this.#drawn = "";
    this.#note(isKept ? "Stopped." : "Stopped. The conversation is as it was before.");
  }

  #explain({ usage, explain, reason }) {
    const lines = [];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      const why = explain && WHY[explain.where]?.(explain);
      const summary = h("summary", {}, `${cached} of ${count(usage.prompt_tokens, "prompt token")} cached`);
      lines.push(h("details", {}, summary, why && h("p", {}, why), h("p", {}, `${count(usage.completion_tokens, "token")} generated.`)));
    }
    if (reason === "length") lines.push(h("p", {}, "The answer was cut: it reached the limit of tokens."));
    this.part.last.replaceChildren(...lines);
  }

  // --- operations ---------------------------------------------------------------------------------------------------------------

  /** Ask the server to change the session, and show what came of it. */
  async #change(operation, body, done) {
    this.part.alert.replaceChildren();
    try {
      const changed = await post(`v1/sessions/${this.id}/${operation}`, body);
      if (done) this.#note(done);
      await this.load();
      return changed;
    } catch (error) {
      this.fail(error);
      return null;
    }
  }

  async fork(from) {
    const made = await this.#change("fork", { ...from, name: this.page.nextName(this.session.name) });
    if (made) await this.page.opened(made, this);
  }

  save() {
    return this.#change("save", {}, "Saved to the server's disk.");
  }

  restore() {
    return this.#change("restore", {}, "Restored from the server's disk.");
  }

  async rewind({ index, role, content }) {
    const changed = await this.#change("rewind", { messages: this.session.messages.length - index }, "Rewound.");
    if (changed && role === "user" && !this.part.input.value) {
      this.part.input.value = content; // to be asked otherwise
      this.#grow();
      this.part.input.focus();
    }
  }

  async edit({ index, role, content }) {
    const option = (value, title, what, checked) =>
      h("label", { class: "option" }, h("input", { type: "radio", name: "mode", value, checked }), h("span", {}, h("strong", {}, title), what));
    const short = content.length > 90 ? `${content.slice(0, 90)}…` : content;
    const answer = await ask(
      `Remove ${role} message ${index + 1}`,
      [
        h("p", { class: "faint" }, quoted(short)),
        option("exact", "Exact", "What follows is evaluated again, as if the message had never been there.", true),
        option("shift", "Shift", "What follows keeps its keys and values and moves down: at once, but they were made with the message in view.", false),
      ],
      "Remove",
    );
    if (answer) await this.#change("edit", { message: index, mode: answer.mode }, answer.mode === "exact" ? "Removed; what follows will be evaluated again." : "Removed; what follows has moved down.");
  }
}
