// Axes and curves of a chart.

const MAX_DOTS = 80; // a curve of at most this number of points is drawn with dots
const NAMES = { step: "step", tokens: "tokens", seconds: "training time" };

function svgElement(parent, tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function draw(chart) {
  const [left, top, width, height] = chart.box;
  drawAxes(chart);
  const clip = { x: left, y: top, width, height, viewBox: `${left} ${top} ${width} ${height}`, overflow: "hidden" };
  const inner = svgElement(chart.layer, "svg", clip);
  for (const { step, run, colour } of chart.data.restarts) {
    const at = chart.toX(chart.along(run, step));
    if (!Number.isFinite(at)) continue;
    const style = { stroke: `var(--${colour})`, "stroke-width": 0.9, "stroke-dasharray": "1.4 1.8" };
    svgElement(inner, "line", { x1: at, x2: at, y1: top, y2: top + height, ...style });
  }
  for (const { line, kind, xs, ys } of chart.series) {
    const faint = { "stroke-width": 0.6, "stroke-opacity": 0.25 };
    const style = kind === "faint" ? faint : { "stroke-width": 1.5, "stroke-dasharray": line.dash };
    svgElement(inner, "path", { d: pathOf(xs, ys), fill: "none", stroke: `var(--${line.colour})`, ...style });
    if (kind === "faint" || xs.length > MAX_DOTS) continue;
    xs.forEach((x, at) => {
      const known = Number.isFinite(x) && Number.isFinite(ys[at]);
      if (known) svgElement(inner, "circle", { cx: x, cy: ys[at], r: 1.5, fill: `var(--${line.colour})` });
    });
  }
  for (const { run, bad } of chart.data.lines) {
    for (const step of bad) {
      const at = chart.toX(chart.along(run, step));
      if (!Number.isFinite(at)) continue;
      const y = top + 0.03 * height;
      const d = `M${at - 2.5} ${y - 2.5}l5 5m0 -5l-5 5`;
      svgElement(inner, "path", { d, stroke: "var(--bad)", fill: "none" });
    }
  }
}

function drawAxes(chart) {
  const [left, top, width, height] = chart.box;
  const { x, logX, logY } = chart.settings;
  const bottom = top + height;
  const [size, unit] = x === "seconds" ? durationUnit(chart.rangeX[1]) : [1, ""];
  const ticksX = (logX ? logTicks : linearTicks)(chart.rangeX[0] / size, chart.rangeX[1] / size, width > 500 ? 10 : 5);
  const ticksY = (logY ? logTicks : linearTicks)(chart.rangeY[0], chart.rangeY[1], 6);
  const text = (attributes, content) =>
    svgElement(chart.layer, "text", { "font-size": 8, fill: "var(--soft)", "text-anchor": "middle", ...attributes }, content);
  for (const tick of ticksY) {
    const y = chart.toY(tick);
    svgElement(chart.layer, "line", { x1: left, x2: left + width, y1: y, y2: y, stroke: "var(--line)", "stroke-width": 0.8 });
    text({ x: left - 3, y: y + 3, "text-anchor": "end" }, formatNumber(tick));
  }
  const isShown = (tick) => tick >= 0 && (x !== "step" || Number.isInteger(tick));
  for (const tick of ticksX.filter(isShown)) {
    const at = chart.toX(tick * size);
    svgElement(chart.layer, "line", { x1: at, x2: at, y1: bottom, y2: bottom + 3, stroke: "var(--line)" });
    text({ x: at, y: bottom + 12 }, x === "tokens" ? formatCount(tick) : formatNumber(tick));
  }
  text({ x: left + width / 2, y: bottom + 24 }, unit ? `${NAMES[x]} (${unit})` : NAMES[x]);
  text({ x: 0, y: 0, transform: `translate(7 ${top + height / 2}) rotate(-90)` }, chart.data.unit);
}
