// The switches above the curves: what the x axis shows, and which axes are logarithmic. Kept in the page's address.

function readSettings(hash) {
  const [, x, log] = /^#x=(\w+)(?:&log=(\w+))?/.exec(hash) || ["", "step", ""];
  return { x, logX: (log || "").includes("x"), logY: (log || "").includes("y") };
}

function writeSettings(settings) {
  const log = (settings.logX ? "x" : "") + (settings.logY ? "y" : "");
  return `#x=${settings.x}${log ? `&log=${log}` : ""}`;
}

function addControls(plots, axes, settings, changed) {
  const bar = document.createElement("div");
  bar.className = "controls";
  const add = (label, tag) => {
    const around = document.createElement("label");
    const made = document.createElement(tag);
    around.append(...(tag === "select" ? [label, made] : [made, label]));
    bar.append(around);
    return made;
  };
  const select = add("x axis: ", "select");
  for (const axis of axes) {
    const option = document.createElement("option");
    option.value = axis;
    option.textContent = NAMES[axis];
    select.append(option);
  }
  select.value = settings.x;
  select.addEventListener("change", () => changed({ x: select.value }));
  for (const [name, label] of [["logX", "logarithmic x"], ["logY", "logarithmic y"]]) {
    const box = add(label, "input");
    box.type = "checkbox";
    box.checked = settings[name];
    box.addEventListener("change", () => changed({ [name]: box.checked }));
  }
  plots.before(bar);
}

function start() {
  const data = JSON.parse(document.getElementById("chart-data").textContent);
  for (const run of data.runs) {
    for (const axis of ["tokens", "seconds"]) if (run[axis]) run[axis] = decode(run[axis]);
  }
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const charts = figures.map((figure) => new Chart(figure, data.plots[figure.getAttribute("data-chart")], data.runs));
  const axes = ["step", ...["tokens", "seconds"].filter((axis) => data.runs.some((run) => run[axis]))];
  let settings = readSettings(location.hash);
  if (!axes.includes(settings.x)) settings.x = "step";
  const changed = (change) => {
    settings = { ...settings, ...change };
    history.replaceState(null, "", writeSettings(settings));
    for (const chart of charts) chart.show(settings);
  };
  if (charts.length) addControls(document.querySelector(".plots"), axes, settings, changed);
  for (const chart of charts) chart.show(settings);
}

start();
