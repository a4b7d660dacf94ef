// One chart of the page: its picture for the chosen axes, and a crosshair at the point nearest to the pointer.

const WIDE = 806, NARROW = 396; // widths of pictures in their coordinates

class Chart {
  constructor(figure, data, runs) {
    this.data = data;
    this.runs = runs;
    this.figure = figure;
    const [width, height] = data.wide ? [WIDE, 260] : [NARROW, 190];
    this.box = [58, 6, width - 68, height - 36]; // left, top, width and height of the area in the axes
    const label = figure.querySelector("b").textContent;
    this.svg = svgElement(figure, "svg", { class: "chart", role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}` });
    this.series = data.lines.flatMap((line) =>
      [["faint", line.faint], ["curve", line.curve]]
        .filter(([, stored]) => stored)
        .map(([kind, stored]) => ({ line, kind, ...decode(stored) })),
    );
    this.layer = svgElement(this.svg, "g", { class: "drawn", "stroke-linejoin": "round" });
    this.cross = svgElement(this.svg, "g", { class: "cross" });
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    figure.append(this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
  }

  // Draw for `settings` = {x, logX, logY}.
  show(settings) {
    this.settings = settings;
    this.place();
    this.leave();
    this.layer.replaceChildren();
    this.figure.querySelector(".note").hidden = settings.logY; // then the highest value is in the picture
    draw(this);
  }

  // The x of a step of a run; NaN if it is unknown.
  along(run, step) {
    if (this.settings.x === "step") return step;
    const axis = this.runs[run][this.settings.x];
    return axis ? valueAt(axis, step) : NaN;
  }

  // Compute the scales and where each point is in the picture.
  place() {
    const { x: axis, logX, logY } = this.settings;
    const [left, top, width, height] = this.box;
    for (const each of this.series) each.along = each.steps.map((step) => this.along(each.line.run, step));
    const all = this.series.map((each) => each.along);
    const ends = [0, axis === "step" ? this.data.last_step : 0]; // all charts over steps show all steps
    this.rangeX = rangeOf(logX ? all : [ends, ...all], logX, 0.01);
    this.rangeY = logY ? rangeOf(this.series.map((each) => each.values), true, 0.05) : this.data.y;
    const [x, y] = [scaleOf(this.rangeX, logX), scaleOf(this.rangeY, logY)];
    this.toX = (value) => left + width * x(value);
    this.toY = (value) => top + height * (1 - y(value));
    for (const each of this.series) {
      each.xs = each.along.map(this.toX);
      each.ys = each.values.map(this.toY);
    }
  }

  point(event) {
    const area = this.svg.getBoundingClientRect();
    const scale = this.svg.viewBox.baseVal.width / area.width;
    const found = nearestPoint(this.series, (event.clientX - area.left) * scale, (event.clientY - area.top) * scale);
    if (found === null) return;
    const { line: series, at } = found;
    const [left, top, width, height] = this.box;
    const [x, y] = [series.xs[at], Math.min(Math.max(series.ys[at], top), top + height)];
    const style = { stroke: "var(--soft)", "stroke-width": 0.6, "stroke-dasharray": "2 2" };
    this.cross.replaceChildren();
    svgElement(this.cross, "line", { x1: x, x2: x, y1: top, y2: top + height, ...style });
    svgElement(this.cross, "line", { x1: left, x2: left + width, y1: y, y2: y, ...style });
    svgElement(this.cross, "circle", { cx: x, cy: y, r: 3, fill: `var(--${series.line.colour})` });
    this.tip.textContent = this.describe(series, at);
    const frame = this.figure.getBoundingClientRect();
    const right = x > left + width / 2; // then the text is on the left of the point
    this.tip.className = right ? "tip shown left" : "tip shown";
    this.tip.style.left = `${area.left - frame.left + x / scale}px`;
    this.tip.style.top = `${area.top - frame.top + y / scale}px`;
  }

  // Run, metric, step, tokens or time if that is the x axis, and value: a line of text each.
  describe(series, at) {
    const { line, kind } = series;
    const name = this.runs[line.run].name;
    const smoothed = kind === "curve" && line.smoothed ? " (smoothed)" : "";
    const lines = [name, ...(line.label === name ? [] : [line.label]), `step ${formatNumber(Math.round(series.steps[at]))}`];
    const along = series.along[at];
    if (this.settings.x === "tokens") lines.push(`${formatCount(along)} tokens`);
    if (this.settings.x === "seconds") {
      const [size, unit] = durationUnit(along);
      lines.push(`${formatNumber(along / size)} ${unit} of training`);
    }
    return [...lines, `${formatNumber(series.values[at])} ${this.data.unit}${smoothed}`.trim()].join("\n");
  }

  leave() {
    this.cross.replaceChildren();
    this.tip.className = "tip";
  }
}
