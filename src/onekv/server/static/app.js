// The page: which conversations are open, what the server has besides, settings, theme, and the polling of the map.

import { ApiError, get, post, remove } from "./api.js";
import { CellMap, HUES } from "./cells.js";
import { Conversation } from "./conversation.js";
import { ask, count, h, labelled } from "./dom.js";

const MAP_MS = 500;
const LIST_MS = 2000;
const FIRST_OPEN = 3; // conversations that are open when the page is seen for the first time

const at = (id) => document.getElementById(id);
const stored = (name, otherwise) => JSON.parse(localStorage.getItem(`onekv.${name}`) ?? "null") ?? otherwise;
const keep = (name, value) => localStorage.setItem(`onekv.${name}`, JSON.stringify(value));

const conversations = new Map(); // those that are open, by session id, in the order of their columns
const hues = new Map(); // session id -> its number on this page, which gives its colour
let sessions = [];
let lit = null; // {session, message} the pointer is on

const page = { settings: { temperature: 0.7, limit: 512, ...stored("settings", {}) }, longest: Infinity, opened: open, nextName, closed: close, deleted, light };
const map = new CellMap(at("map"), (id) => hues.has(id) && { name: sessions.find((one) => one.id === id)?.name ?? "Untitled", number: hues.get(id) });

function hueOf(id) {
  if (!hues.has(id)) hues.set(id, hues.size);
  return hues.get(id) % HUES;
}

function fail(place, error) {
  at(place).replaceChildren(error ? h("p", { class: "alert", role: "alert" }, error.message) : "");
}

// --- conversations ------------------------------------------------------------------------------------------------------------------

async function open(session, after = null, isAsked = true) {
  if (conversations.has(session.id)) return;
  const conversation = new Conversation(session, hueOf(session.id), page);
  const entries = [...conversations];
  const place = after ? entries.findIndex(([id]) => id === after.id) + 1 : entries.length;
  entries.splice(place, 0, [session.id, conversation]);
  conversations.clear();
  for (const [id, one] of entries) conversations.set(id, one);
  if (after) after.element.after(conversation.element);
  else at("start").before(conversation.element);
  keep("open", [...conversations.keys()]);
  if (isAsked) {
    conversation.element.scrollIntoView({ block: "nearest", inline: "nearest" });
    conversation.part.input.focus({ preventScroll: true });
  }
  try {
    await conversation.load();
  } catch (error) {
    conversation.fail(error);
  }
  await list();
}

/** For a fork: the name with the next number that is free. */
function nextName(name) {
  const base = name.replace(/ \d+$/, "");
  const names = new Set(sessions.map((session) => session.name));
  let number = 2;
  while (names.has(`${base} ${number}`)) number++;
  return `${base} ${number}`;
}

function close(id) {
  const conversation = conversations.get(id);
  conversation?.stop();
  conversation?.element.remove();
  conversations.delete(id);
  keep("open", [...conversations.keys()]);
  others();
  at("new-name").focus();
}

async function deleted(session) {
  const what = session.saved ? "Its cells are given back and what is saved of it is deleted." : "Its cells are given back.";
  if (!(await ask(`Delete ${session.name || "Untitled"}?`, h("p", {}, what), "Delete", { danger: true }))) return;
  const conversation = conversations.get(session.id);
  try {
    await remove(`v1/sessions/${session.id}`);
    close(session.id);
    await list();
  } catch (error) {
    if (conversation) conversation.fail(error);
    else fail("start-error", error);
  }
}

async function create(event) {
  event.preventDefault();
  const name = at("new-name").value.trim();
  fail("start-error", null);
  try {
    const session = await post("v1/sessions", name ? { name } : {});
    at("new-name").value = "";
    await open(session);
  } catch (error) {
    fail("start-error", error);
  }
}

/** Open one of the list; what is only on disk is restored first. */
async function reopen(session) {
  fail("start-error", null);
  try {
    await open(session.state === "saved" ? await post(`v1/sessions/${session.id}/restore`) : session);
  } catch (error) {
    fail("start-error", error);
  }
}

/** The sessions of the server: the open ones show their numbers, the others are listed. */
async function list() {
  const before = [...conversations]; // one that is opened while the list is made may not be in it
  sessions = (await get("v1/sessions")).data;
  for (const session of sessions) hueOf(session.id);
  for (const [id, conversation] of before) conversation.update(sessions.find((one) => one.id === id));
  others();
}

function others() {
  const closed = sessions.filter((session) => !conversations.has(session.id));
  at("others-title").hidden = !closed.length;
  const text = JSON.stringify(closed.map(({ id, name, tokens, state }) => [id, name, tokens, state]));
  if (text === at("others").dataset.text) return; // leave the focus where it is
  at("others").dataset.text = text;
  at("others").replaceChildren(...closed.map(entry));
}

function entry(session) {
  const name = session.name || "Untitled";
  const verb = session.state === "saved" ? "Restore" : "Open";
  const button = (text, onclick) => h("button", { type: "button", class: "quiet small", "aria-label": `${text} ${name}`, onclick }, text);
  return h(
    "li",
    { class: "row spread" },
    h("span", { class: "name" }, name, h("span", { class: "faint small" }, `${count(session.tokens, "token")}, ${session.state === "saved" ? "on disk" : "in memory"}`)),
    h("span", { class: "row" }, button(verb, () => reopen(session)), button("Delete", () => deleted(session))),
  );
}

// --- the map ------------------------------------------------------------------------------------------------------------------------

function light(session, message) {
  lit = message && message.start !== null && message.end !== null ? message : null;
  map.light(lit && map.span(session.id, lit.start, lit.end));
}

function showMap(isShown) {
  document.body.classList.toggle("without-map", !isShown);
  at("toggle-map").setAttribute("aria-expanded", isShown);
  keep("map", isShown);
}

/** Do something now and then, while the page can be seen; never twice at a time. What fails is shown at `place` until it works again. */
async function poll(work, milliseconds, place, isWanted = () => true) {
  for (;;) {
    let pause = milliseconds;
    if (document.visibilityState === "visible" && isWanted()) {
      try {
        await work();
        fail(place, null);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        fail(place, error);
        pause = 4 * milliseconds;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

// --- settings and theme -------------------------------------------------------------------------------------------------------------

async function settings() {
  const { temperature, limit } = page.settings;
  const number = (name, value, attributes) => h("input", { name, type: "number", value, ...attributes });
  const answer = await ask(
    "Settings",
    [
      labelled("Temperature", number("temperature", temperature, { min: 0, max: 2, step: 0.1, required: true })),
      labelled("Most tokens of an answer", number("limit", limit, { min: 1, step: 1, placeholder: "As many as fit" })),
    ],
    "Keep",
  );
  if (!answer) return;
  page.settings = { temperature: Number(answer.temperature), limit: Number(answer.limit) || null };
  keep("settings", page.settings);
}

const system = matchMedia("(prefers-color-scheme: dark)");

function themed() {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : system.matches;
  at("theme").textContent = isDark ? "Light" : "Dark";
  at("theme").setAttribute("aria-label", `Use the ${isDark ? "light" : "dark"} theme`);
  map.repaint();
  return isDark;
}

function otherTheme() {
  const next = themed() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("onekv.theme", next);
  themed();
}

// --- the beginning ------------------------------------------------------------------------------------------------------------------

async function begin() {
  at("new").addEventListener("submit", create);
  at("add").addEventListener("click", () => {
    if (at("columns").offsetParent === null) showMap(false); // a narrow window shows one or the other
    at("new-name").focus();
  });
  at("settings").addEventListener("click", settings);
  at("theme").addEventListener("click", otherTheme);
  system.addEventListener("change", themed);
  at("toggle-map").addEventListener("click", () => showMap(document.body.classList.contains("without-map")));
  showMap(stored("map", innerWidth > 800));
  themed();
  try {
    const [model] = (await get("v1/models")).data;
    at("model").textContent = model.id;
    page.longest = model.max_model_len;
    document.title = `${model.id} · onekv`;
    await list();
    const alive = sessions.filter((session) => session.state !== "saved").map((session) => session.id);
    for (const id of stored("open", alive.slice(-FIRST_OPEN)).filter((one) => alive.includes(one))) {
      await open(sessions.find((one) => one.id === id), null, false);
    }
  } catch (error) {
    fail("start-error", error);
  }
  poll(list, LIST_MS, "list-error");
  poll(async () => map.show(await get("v1/cells")), MAP_MS, "map-error", () => !document.body.classList.contains("without-map"));
}

begin();
