// Create and change elements. An element changes only if its content differs, so that selection and focus stay.

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Give `parent` one child per item: made by `create()`, then changed by `update(child, item, index)`.
export function fill(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, index) => update(parent.children[index], item, index));
}

// Set the rows of a table's body; a cell is a text or [text, class].
export function fillTable(table, rows) {
  fill(table.tBodies[0], rows, () => make("tr"), (line, cells) => fill(line, cells, () => make("td"), fillCell));
}

// The same, with a button in the first cell of each row; a click calls `chosen(name)`, the row of `name` is marked.
export function fillChoices(table, rows, name, chosen) {
  const row = () => make("tr", {}, make("td", {}, make("button", { type: "button" })));
  fill(table.tBodies[0], rows, row, (line, [own, ...cells]) => {
    const button = line.firstElementChild.firstElementChild;
    line.classList.toggle("chosen", own === name);
    setText(button, own);
    setAttribute(button, "aria-pressed", String(own === name));
    button.onclick = () => chosen(own);
    cells.forEach((cell, index) => fillCell(line.children[index + 1] ?? line.appendChild(make("td")), cell));
  });
}

function fillCell(cell, content) {
  const [text, kind] = Array.isArray(content) ? content : [content, ""];
  setText(cell, text);
  if (cell.className !== kind) cell.className = kind;
}

// Set buttons of which one is pressed: [[value, label], ...]; a click calls `chosen(value)`.
export function fillSwitch(group, choices, value, chosen) {
  fill(group, choices, () => make("button", { type: "button" }), (button, [key, label]) => {
    setText(button, label);
    setAttribute(button, "aria-pressed", String(key === value));
    button.onclick = () => chosen(key);
  });
}

// The value of a color of the style sheet, for a canvas.
export function color(name) {
  const probe = document.body.appendChild(make("i", { hidden: true }));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
