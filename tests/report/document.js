// The part of a browser's document that the page's script uses, over a tree of [tag, attributes, children].

class Element {
  constructor(tag, attributes = {}, children = []) {
    this.tag = tag;
    this.attributes = attributes;
    this.children = children.filter((child) => typeof child !== "string");
    this.text = children.filter((child) => typeof child === "string").join("");
    this.style = {};
    this.listeners = {};
    for (const child of this.children) child.parent = this;
  }
  get id() { return this.attributes.id || ""; }
  get className() { return this.attributes.class || ""; }
  set className(value) { this.attributes.class = value; }
  get textContent() { return this.text + this.children.map((child) => child.textContent).join(""); }
  set textContent(value) { this.text = value; this.children = []; }
  get viewBox() { return { baseVal: { width: Number(this.attributes.viewBox.split(" ")[2]) } }; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return this.attributes[name]; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  send(name, event = {}) { this.listeners[name](event); }
  append(...added) {
    for (const each of added) {
      if (typeof each === "string") this.text += each;
      else { this.children.push(each); each.parent = this; }
    }
  }
  // the only user of this method puts a new element before the charts
  before(element) {
    const siblings = this.parent.children;
    siblings.splice(siblings.indexOf(this), 0, element);
  }
  replaceChildren() { this.children = []; }
  // half as large as its coordinates, 10 pixels from the window's corner
  getBoundingClientRect() { return { left: 10, top: 10, width: this.attributes.viewBox ? this.viewBox.baseVal.width / 2 : 0 }; }
  all() { return this.children.flatMap((child) => [child, ...child.all()]); }
  matches(selector) {
    const [, tag, name, attribute] = /^([a-z]*)(?:\.(\w+))?(?:\[([\w-]+)\])?$/.exec(selector);
    return (!tag || this.tag === tag) && (!name || this.className.split(" ").includes(name))
      && (!attribute || this.attributes[attribute] !== undefined);
  }
  querySelectorAll(selector) { return this.all().filter((each) => each.matches(selector)); }
  querySelector(selector) { return this.querySelectorAll(selector)[0] || null; }
}

function elementOf([tag, attributes, children]) {
  return new Element(tag, attributes, children.map((child) => (typeof child === "string" ? child : elementOf(child))));
}

function openPage(tree, hash) {
  const root = elementOf(tree);
  globalThis.location = { hash };
  globalThis.history = { replaceState: (state, title, url) => { location.hash = url; } };
  globalThis.document = {
    createElement: (tag) => new Element(tag),
    createElementNS: (space, tag) => new Element(tag),
    getElementById: (id) => root.all().find((each) => each.id === id),
    querySelector: (selector) => root.querySelector(selector),
    querySelectorAll: (selector) => root.querySelectorAll(selector),
  };
}

// For tests: set a switch of the page, and move the pointer over a chart to a point in its coordinates.
function choose(number, value) {
  const control = document.querySelector(".controls").all().filter((each) => ["select", "input"].includes(each.tag))[number];
  if (control.tag === "select") control.value = value;
  else control.checked = value;
  control.send("change");
}

function figureOf(name) {
  return document.querySelectorAll("figure[data-chart]").find((each) => each.getAttribute("data-chart") === name);
}

function pointAt(name, x, y) {
  const figure = figureOf(name);
  figure.querySelector(".chart").send("pointermove", { clientX: 10 + x / 2, clientY: 10 + y / 2 });
  return figure.querySelector(".shown").textContent;
}
