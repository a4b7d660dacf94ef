// Arithmetic of the charts, without a document: scales, ticks, numbers as text, the nearest point.

const LETTERS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
const DURATIONS = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]];

// A series of points from its stored form, in which steps are differences and null is a gap.
function decode(stored) {
  let step = 0;
  return {
    steps: stored.steps.map((difference) => (step += difference)),
    values: stored.values.map((value) => (value === null ? NaN : value)),
  };
}

// The value of a series at a step: linear between two points, constant before the first and after the last.
function valueAt(series, step) {
  const { steps, values } = series;
  let low = 0;
  let high = steps.length - 1;
  if (step <= steps[low]) return values[low];
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  const part = (step - steps[low]) / (steps[high] - steps[low]);
  return values[low] + part * (values[high] - values[low]);
}

// The smallest and largest of the finite values, or of the positive ones; `margin` is a part of their distance.
function rangeOf(lists, log, margin) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (!Number.isFinite(value) || (log && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (log) {
    const factor = high > low ? (high / low) ** margin : 2;
    return [low / factor, high * factor];
  }
  const more = high > low ? margin * (high - low) : Math.abs(high) || 1;
  return [low - more, high + more];
}

// A function from values to 0..1; NaN for what a logarithmic axis cannot show.
function scaleOf([low, high], log) {
  const of = log ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value;
  return (value) => (of(value) - of(low)) / (of(high) - of(low));
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((each) => each * power >= rough * (1 - 1e-9)) * power;
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-12); at += 1) {
    ticks.push(Number((at * step).toPrecision(12)));
  }
  return ticks;
}

// Powers of ten; with 2 and 5 times them in a short range; as on a linear axis within less than a factor of four.
function logTicks(low, high, count) {
  if (high / low < 4) return linearTicks(low, high, count);
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const every = Math.ceil((last - first) / count);
  const within = last - first <= count / 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = first; power <= last; power += every) {
    for (const times of within) ticks.push(Number(`${times}e${power}`));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

function formatNumber(value) {
  if (!Number.isFinite(value)) return "NaN or infinite";
  const size = Math.abs(value);
  if (size >= 1000) return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
  return size !== 0 && size < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
}

function formatCount(value) {
  const [size, letter] = LETTERS.find(([each]) => value >= each) || [1, ""];
  return `${Number((value / size).toPrecision(4))}${letter ? ` ${letter}` : ""}`;
}

// The unit of an axis of seconds: [how many seconds it is, its name].
function durationUnit(seconds) {
  return DURATIONS.find(([size]) => seconds >= 2 * size) || DURATIONS[DURATIONS.length - 1];
}

// Points as the path of an SVG, with a gap where a coordinate is NaN.
function pathOf(xs, ys) {
  let path = "";
  let pen = "M";
  xs.forEach((x, at) => {
    const known = Number.isFinite(x) && Number.isFinite(ys[at]);
    if (known) path += `${pen}${x.toFixed(1)} ${ys[at].toFixed(1)}`;
    pen = known ? "L" : "M";
  });
  return path;
}

// The point nearest to (x, y) among `lines` of {xs, ys}: {line, at}, or null if there is none.
function nearestPoint(lines, x, y) {
  let best = null;
  let least = Infinity;
  for (const line of lines) {
    for (let at = 0; at < line.xs.length; at += 1) {
      const distance = (line.xs[at] - x) ** 2 + (line.ys[at] - y) ** 2;
      if (distance < least) {
        least = distance;
        best = { line, at };
      }
    }
  }
  return best;
}
