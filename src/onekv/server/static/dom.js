// Elements, dialogs, and how numbers are written. Text becomes text nodes, never HTML.

/** An element. Attributes whose name starts with "on" are listeners; false, null and undefined ones are left out, as are such children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

let labels = 0;

/** A control with its label before it. */
export function labelled(text, control, attributes = {}) {
  control.id ||= `control-${++labels}`;
  return h("div", { class: "field", ...attributes }, h("label", { for: control.id }, text), control);
}

/** Ask in a modal dialog. The values of its form by name, or null when it was cancelled. */
export function ask(title, content, confirm, { danger = false } = {}) {
  const { promise, resolve } = Promise.withResolvers ? Promise.withResolvers() : deferred();
  const form = h(
    "form",
    { onsubmit: submit },
    h("h2", { id: "dialog-title" }, title),
    content,
    h(
      "div",
      { class: "row end" },
      h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"),
      h("button", { type: "submit", class: danger ? "danger" : "primary" }, confirm),
    ),
  );
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", onclose: closed }, form);
  let values = null;
  function submit(event) {
    event.preventDefault();
    values = Object.fromEntries(new FormData(form));
    dialog.close();
  }
  function closed() {
    dialog.remove();
    resolve(values);
  }
  document.body.append(dialog);
  dialog.showModal();
  return promise;
}

function deferred() {
  const made = {};
  made.promise = new Promise((resolve) => (made.resolve = resolve));
  return made;
}

/** A count with its noun. */
export function count(number, noun, plural = `${noun}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}

/** Bytes for people. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  for (; number >= 1000 && i < units.length - 1; i++) number /= 1000;
  return `${i && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[i]}`;
}

/** Text between quotation marks, with what cannot be seen written out. */
export function quoted(text) {
  return `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥")}”`;
}
